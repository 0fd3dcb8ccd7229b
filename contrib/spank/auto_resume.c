/*
 * auto_resume: the option --auto-resume=1 for srun, sbatch and salloc, as users of SageMaker HyperPod know it.
 *
 * It sets PHALANX_AUTO_RESUME in the environment of the job's tasks, no more. `phalanx train`, started by srun as one
 * task on each node, then has an agent there that starts its ranks again, instead of taking each task for a rank.
 * Given to sbatch it holds for every srun in the script; what is given to an srun itself holds there.
 *
 *     make -C contrib/spank                       # needs gcc and Slurm's headers (Debian: libslurm-dev)
 *     optional /usr/lib/slurm/auto_resume.so      # a line of plugstack.conf
 *
 * Interface: spank(8), slurm/spank.h.
 */
#include <slurm/spank.h>
#include <stdlib.h>
#include <string.h>

SPANK_PLUGIN(auto_resume, 1);

static const char variable[] = "PHALANX_AUTO_RESUME";
static char chosen[2] = ""; /* "0", "1", or "": the option was not given */

/* Takes the option's value; called by the command itself, and again on the nodes with what it was given there. */
static int take(int val, const char *argument, int remote)
{
	(void) val;
	(void) remote;
	if (argument == NULL || (strcmp(argument, "0") != 0 && strcmp(argument, "1") != 0)) {
		slurm_error("--auto-resume must be 0 or 1, not %s; with 1 `phalanx train` starts its ranks again "
			    "when one fails", argument == NULL ? "nothing" : argument);
		return ESPANK_BAD_ARG;
	}
	chosen[0] = argument[0];
	return ESPANK_SUCCESS;
}

static struct spank_option option = {
	.name = "auto-resume",
	.arginfo = "0|1",
	.usage = "let `phalanx train` start its ranks again when one fails",
	.has_arg = 1,
	.val = 0,
	.cb = take,
};

int slurm_spank_init(spank_t spank, int argc, char *argv[])
{
	(void) argc;
	(void) argv;
	switch (spank_context()) {
	case S_CTX_LOCAL:	/* srun */
	case S_CTX_ALLOCATOR:	/* sbatch, salloc */
	case S_CTX_REMOTE:	/* slurmstepd */
		return spank_option_register(spank, &option);
	default:
		return ESPANK_SUCCESS;
	}
}

/* In srun, sbatch and salloc: their environment becomes the job's. */
int slurm_spank_init_post_opt(spank_t spank, int argc, char *argv[])
{
	(void) spank;
	(void) argc;
	(void) argv;
	if (chosen[0] != '\0' && spank_context() != S_CTX_REMOTE && setenv(variable, chosen, 1) != 0)
		return ESPANK_ERROR;
	return ESPANK_SUCCESS;
}

/* On the nodes: also where the environment is not handed on (--export=NONE). */
int slurm_spank_task_init(spank_t spank, int argc, char *argv[])
{
	(void) argc;
	(void) argv;
	if (chosen[0] == '\0')
		return ESPANK_SUCCESS;
	return spank_setenv(spank, variable, chosen, 1);
}
