"""Draw mutants of what decides and divides, and see that a test notices: `python -m tests.mutants`.

A mutant has one comparison, operator, constant or condition of a function that is other than it is, or a number with a
name that is twice or half of it. The fast tests of its file run on it until one fails (tests/mutation.py). Which are
drawn depends on the seed; `--number 100` are the first of `--number 300`. Survivors are printed, and the exit code is 1
where more than one in twenty of those survives that are not in EQUIVALENT.
"""

import ast
import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.helpers import ROOT
from tests.mutation import Mutant, judge, nodes, options, replaced

SURVIVE = 0.05  # the part that may
UNIT = "tests/unit/test_"
NODES = [f"{UNIT}decide.py", f"{UNIT}failover.py", f"{UNIT}coordinator.py"]

# What decides and divides, and the tests that know it best, the fastest first.
TESTS = {
    "layout/balance.py": [f"{UNIT}balance.py", f"{UNIT}rebalance.py", f"{UNIT}packing.py", f"{UNIT}loader.py"],
    "layout/rebalance.py": [f"{UNIT}rebalance_line.py", f"{UNIT}like_devices.py", f"{UNIT}rebalance.py"],
    "layout/rank_speed.py": [f"{UNIT}rebalance_line.py", f"{UNIT}like_devices.py", f"{UNIT}rebalance.py"],
    "layout/mesh_axes.py": [f"{UNIT}mesh_axes.py"],
    "layout/tensor_shards.py": [f"{UNIT}tensor_shards.py"],
    "layout/pipeline_stages.py": [f"{UNIT}pipeline_stages.py", f"{UNIT}plan_cost.py"],
    "parallel/pipeline.py": [f"{UNIT}pipeline_stages.py", f"{UNIT}plan_cost.py"],
    "optim/gradients.py": [f"{UNIT}gradients.py", f"{UNIT}update.py"],
    "layout/comm_schedule.py": [f"{UNIT}comm_schedule.py", f"{UNIT}timing.py"],
    "layout/buckets.py": [f"{UNIT}buckets.py", f"{UNIT}balance.py"],
    "data/shuffle.py": [f"{UNIT}loader.py"],
    "data/packing.py": [f"{UNIT}packing.py", f"{UNIT}loader.py"],
    "trainer/anomalies.py": [f"{UNIT}anomalies.py"],
    "trainer/skipped_batches.py": [f"{UNIT}anomalies.py"],
    "elastic/supervisor/decide.py": NODES,
    "elastic/supervisor/state.py": NODES,
    "elastic/supervisor/failover.py": [f"{UNIT}failover.py", *NODES],
    "elastic/membership/member_list.py": [
        f"{UNIT}member_list.py",
        f"{UNIT}failover.py",
        f"{UNIT}heartbeat_sender.py",
        f"{UNIT}coordinator.py",
        "tests/cluster/test_membership.py",
    ],
    "elastic/membership/election.py": [
        f"{UNIT}fencing.py",
        "tests/cluster/test_membership_turns.py",
        "tests/cluster/test_membership.py",
    ],
    "elastic/membership/heartbeat.py": [
        f"{UNIT}heartbeat_sender.py",
        "tests/cluster/test_membership_turns.py",
        "tests/cluster/test_membership.py",
    ],
    "elastic/membership/membership.py": ["tests/cluster/test_membership_turns.py", "tests/cluster/test_membership.py"],
    "elastic/supervisor/assignment.py": [f"{UNIT}assignment.py", *NODES],
}

# "file function: code -> other code" -> why it is no other program.
EQUIVALENT: dict[str, str] = {
    "elastic/membership/heartbeat.py FailureDetector.wake: at > now -> (at) >= (now)": "it is now either way",
    "layout/balance.py _split_below: (count := sum(had)) <= total -> ((count := sum(had))) < (total)": "split gives "
    "the rest itself",
    "layout/balance.py _split_below: 3 -> 4 in aim = (total - len(lines) / 4 - below) / (above - below) if turn % 3 < "
    "2 else 0.5": "how fast the cost is found, and not which",
    "layout/balance.py _split_below: (total - len(lines) / 4 - below) / (above - below) if turn % 3 < 2 else 0.5 -> "
    "(total - len(lines) / 4 - below) / (above - below) if not (turn % 3 < 2) else 0.5": "how fast the cost "
    "is found, and not which",
    "layout/balance.py _split_below: 4 -> 5 in aim = (total - len(lines) / 4 - below) / (above - below) if turn % 3 < "
    "2 else 0.5": "how fast the cost is found, and not which",
    "layout/comm_schedule.py plan_order: 2 -> 1 in for _ in range(max(2, EFFORT // len(after))):": "of more than "
    "20,000 operations one search is enough, and no model has as many",
    "layout/comm_schedule.py lower_bound_s: 0.0 -> -1.0 in all_reduced = 0.0": "no reduce begins before "
    "0, and the greater counts",
    "layout/balance.py divide: best_s * BETTER -> (best_s) / (BETTER)": "of equals the least is taken",
    "layout/balance.py _fluid_parts: bound - most -> (bound) + (most)": "where the search begins",
    "layout/balance.py _fluid_parts: 1 -> 2 in per_s = min(1 / (fixed + each) for fixed, each, _ in "
    "rows)  # no more, or one has no time for one sequence in each": "where the search begins",
    "layout/balance.py _capacity: 0.0 -> -1.0 in return 0.0, 0, False": "either is less than any total",
    "layout/balance.py _split_below: 0 -> 1 in line.cost(0),": "how fast the cost is found, and not which",
    "layout/balance.py _split_below: 0.01 -> -0.995 in cost = low + (high - low) * min(max(aim, 0.01), "
    "0.99)": "how fast the cost is found, and not which",
    "layout/balance.py state_shares: room * ranks -> (room) / (ranks)": "the general case gives the same",
    "layout/balance.py state_shares: 0.0 -> 1.0 in left, shares = needed_bytes, [0.0] * ranks": "all are written over",
    "layout/rebalance.py _decided: history.rejected[1] * (1 - moved) > sure_s * (1 - GAIN) -> "
    "(history.rejected[1] * (1 - moved)) >= (sure_s * (1 - GAIN))": "two measured times are never the same number",
    "layout/rank_speed.py RankSpeed._changed: -1 -> 1": "odd[-1] is asked for where there are two",
    "layout/comm_schedule.py : 1.001 -> 0.5005 in NEAR_ENOUGH = 1.001  # of the bound: the search stops "
    "within it": "the search continues, for an order that is at most a thousandth better",
    "layout/buckets.py make_buckets: 0 -> 1 in needed = 1 + max((at for bucket in buckets for at, part "
    "in enumerate(bucket.parts) if part.elements), default=0)": "some bucket has elements, or there is none",
    "data/shuffle.py shuffle_indices: range(0, ROUNDS, 2) -> range(0, (ROUNDS) - 1, 2)": "ROUNDS is even",
    "parallel/pipeline.py _StageStub.__init__: 1 -> 2 in self.is_first, self.is_last = stage "
    "== 0, stage == stages - 1": "PyTorch makes its table without asking for it",
    "parallel/pipeline.py _StageStub.__init__: 0 -> -1 in self.group_rank, self.group_size = "
    "0, ranks": "PyTorch makes its table without asking for it",
    "layout/pipeline_stages.py _ready: 0.0 -> -1.0 in found = max(found, made[need] + (hop_s if stages.owner(need[1]) "
    "!= stages.owner(stage) else 0.0))": "what a rank has made itself it has made before it begins anything else",
} | {
    f"layout/rebalance.py _decided: 1.0 -> {other} in + max(then.fixed_s - now.fixed_s, 0.0) / (then.fixed_s or "
    "1.0)": "it divides 0"
    for other in ("3.0", "-0.5")
}  # fmt: skip

COMPARED: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="), ast.LtE: ("<", ">"), ast.Gt: (">=", "<="), ast.GtE: (">", "<"),
    ast.Eq: ("!=",), ast.NotEq: ("==",), ast.Is: ("is not",), ast.IsNot: ("is",),
    ast.In: ("not in",), ast.NotIn: ("in",),
}  # fmt: skip
COMPUTED: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.Pow: "*",
    ast.BitOr: "&", ast.BitAnd: "|", ast.LShift: ">>", ast.RShift: "<<",
}  # fmt: skip
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}


def mutants(package: Path) -> Iterator[Mutant]:
    """All mutants, by file and line."""
    for file in TESTS:
        text = (package / file).read_text()
        tree, lines = ast.parse(text), text.split("\n")
        passed_over = {id(node) for part in _no_code(tree) for node in ast.walk(part)}
        for function, node in nodes(tree):
            if isinstance(node, ast.expr) and id(node) not in passed_over:
                for by in _others(node) if function else _twice_and_half(node):
                    within = f" in {lines[node.lineno - 1].strip()}" if isinstance(node, ast.Constant) else ""
                    code = f"{ast.unparse(node)} -> {by}{within}"
                    yield Mutant(file, node.lineno, function, code, replaced(text, node, f"({by})"))


def _no_code(tree: ast.Module) -> Iterator[ast.AST]:
    """What decides nothing: types, what is said, what a programmer claims. And what an imported module does not change
    by: defaults, of a class's fields too, and what is neither a function nor a number with a name."""
    yield from (each for each in tree.body if not isinstance(each, ast.FunctionDef | ast.ClassDef) and not _plain(each))
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        if isinstance(node, ast.FunctionDef):
            yield from node.decorator_list
            yield from (
                each for each in (node.returns, *node.args.defaults, *node.args.kw_defaults) if each is not None
            )
        if isinstance(node, ast.ClassDef):
            yield from node.decorator_list
            yield from (each for each in node.body if not isinstance(each, ast.FunctionDef))
        claims_length = isinstance(node, ast.keyword) and node.arg == "strict"  # of what zip() is given
        if claims_length or isinstance(node, ast.JoinedStr | ast.Assert | ast.Raise):
            yield node


def _plain(node: ast.stmt) -> bool:
    """Whether it gives names to numbers, or to tuples or a dict of them."""
    try:
        return isinstance(node, ast.Assign) and bool(ast.literal_eval(node.value) is not None)
    except ValueError:
        return False


def _others(node: ast.expr) -> Iterator[str]:
    """Other code in the place of an expression."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield from (f"({left}) {other} ({right})" for other in COMPARED[type(node.ops[0])])
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED and not _is_text(node):
        yield f"({ast.unparse(node.left)}) {COMPUTED[type(node.op)]} ({ast.unparse(node.right)})"
    elif isinstance(node, ast.BoolOp):
        other = " or " if isinstance(node.op, ast.And) else " and "
        yield other.join(f"({ast.unparse(value)})" for value in node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield ast.unparse(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield from (str(node.value + 1), str(node.value - 1))
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield from (str(node.value * 2 + 1), str(node.value / 2 - 1))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLED:
        yield CALLED[node.func.id] + ast.unparse(node)[len(node.func.id) :]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        *first, last = map(ast.unparse, node.args[:2])
        yield f"range({', '.join([*first, f'({last}) - 1', *map(ast.unparse, node.args[2:])])})"
    elif isinstance(node, ast.IfExp):
        yield f"{ast.unparse(node.body)} if not ({ast.unparse(node.test)}) else {ast.unparse(node.orelse)}"


def _twice_and_half(node: ast.expr) -> Iterator[str]:
    """A number that has a name was chosen, and to one more or less nothing objects."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield from (str(2 * node.value or 1), str(type(node.value)(node.value / 2)))


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(each, ast.JoinedStr | ast.List | ast.Tuple)
        or (isinstance(each, ast.Constant) and isinstance(each.value, str))
        for each in (node.left, node.right)
    )


def draw(found: Sequence[Mutant], number: int, seed: int) -> list[Mutant]:
    """So many of them, at random: those with the least hashes, so that what changes elsewhere changes no draw."""
    seen: Counter[str] = Counter()  # of some there are several in a line
    turns: dict[bytes, Mutant] = {}
    for mutant in found:
        turns[hashlib.sha256(f"{seed} {mutant.name} {seen[mutant.name]}".encode()).digest()] = mutant
        seen[mutant.name] += 1
    return [turns[turn] for turn in sorted(turns)[:number]]


def main() -> int:
    """Run the mutants that are drawn, of all files or of those that are named."""
    parser = options(__doc__)
    parser.add_argument("--number", type=int, default=300, help="how many are drawn (default 300)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default 1)")
    asked = parser.parse_args()
    found = list(mutants(ROOT / "phalanx"))
    unknown = set(EQUIVALENT) - {each.name for each in found}
    assert not unknown, f"no such mutants: {unknown}"
    drawn = draw(found, asked.number, asked.seed)
    drawn = [each for each in drawn if not asked.files or each.file in asked.files]
    survivors = judge(drawn, lambda mutant: TESTS[mutant.file], EQUIVALENT, asked)
    return 2 if survivors is None else int(len(survivors) > SURVIVE * len(drawn))


if __name__ == "__main__":
    sys.exit(main())
