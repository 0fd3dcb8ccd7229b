"""`python -m phalanx.compat.sagemaker [--smp-config FILE] [--nproc N] SCRIPT [ARGUMENTS]`, also under torchrun."""

from phalanx.compat.sagemaker.command import main

if __name__ == "__main__":
    main()
