"""What agents may say to each other: the schema of their messages, and what is wrong with one that does not keep to it.

Whoever has proved that it knows the secret may still be broken: its memory is damaged, its program is another version,
or it is none of ours. So every message is held against this before anything is done with it, and who sends nonsense is
lost, as if its connection had ended. What a well-formed message claims is believed.
"""

import ipaddress
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from phalanx.elastic.membership.channel import Message

MAX_SHOWN = 60  # characters that are said of what is wrong
NONSENSE = "it sent what makes no sense ({})"  # why a node is lost that does not keep to the schema

Node = Annotated[int, Field(ge=0, lt=1 << 16)]  # as a sign of life has room for
Epoch = Annotated[int, Field(ge=0, lt=1 << 32)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Ranks = Annotated[int, Field(ge=1, lt=1 << 20)]
Port = Annotated[int, Field(ge=1, lt=1 << 16)]
Code = Annotated[int, Field(ge=-255, le=255)]
Kind = type | tuple[type, ...] | list[type]  # of a value; a list: of such values, or nothing
Name = Annotated[str, Field(max_length=1024), AfterValidator(lambda text: _printable(text))]
Text = Annotated[str, Field(max_length=1 << 20)]
Token = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Layout = Annotated[str, Field(pattern=r"^(bare|[0-9a-f]{0,128})$")]


def _address(text: str) -> str:
    ipaddress.ip_address(text)  # a name would be looked up, for which an agent has no time
    return text


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("a name holds what is no text")  # and what a terminal might take for more than that
    return text


def _row(*kinds: Kind) -> AfterValidator:
    """A list of these types in this order."""

    def check(row: list[Any]) -> list[Any]:
        if not _fits(row, kinds):
            raise ValueError("the list has other types of values")
        return row

    return AfterValidator(check)


def _fits(row: list[Any], kinds: Sequence[Kind]) -> bool:
    return len(row) == len(kinds) and all(_is(value, kind) for value, kind in zip(row, kinds, strict=True))


def _is(value: Any, kind: Kind) -> bool:
    if isinstance(kind, list):
        return value is None or (isinstance(value, list) and _fits(value, kind))
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) and not (isinstance(value, float) and math.isnan(value))


Signal = Literal["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"]
Address = Annotated[str, AfterValidator(_address)]
Number, Seconds = (int, float), (int, float, type(None))
Device = Annotated[list[Any], _row(str, str, bool)]
ProgressRow = Annotated[list[Any], _row(int, int, str, int, str, Number, int, Number, int, bool, [int, str, int])]
ProcessStatusRow = Annotated[list[Any], _row(bool, bool, bool)]
HangTimeoutsRow = Annotated[list[Any], _row(Number, Number, Seconds, Seconds)]
Blame = Annotated[list[Any], _row(int, str, str, (int, type(None)))]
Crash = Annotated[list[Any], _row(str, int)]
Slot = Annotated[list[Any], _row(int, str)]
Echo = Annotated[list[Any], _row(str, int)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Member(_Part):
    node: Node
    host: Name
    token: Token
    address: Address
    port: Port
    beats: Port
    devices: Annotated[list[Device], Field(min_length=1)]


class _MemberList(_Part):
    epoch: Epoch
    leader: Node
    members: Annotated[list[_Member], Field(min_length=1)]

    @model_validator(mode="after")
    def _agrees(self) -> "_MemberList":
        nodes = [member.node for member in self.members]
        if len(set(nodes)) < len(nodes) or self.leader not in nodes:
            raise ValueError("its members have no numbers of their own, or do not include the leader")
        return self


class _InventoryEntry(_Part):
    generation: Count
    way: Count
    rank: Count
    world: Ranks
    part: Count
    parts: Ranks
    steps: list[Count]
    layout: Layout
    replica: bool = False

    @model_validator(mode="after")
    def _agrees(self) -> "_InventoryEntry":
        if self.rank >= self.world or self.part >= self.world or self.parts > self.world:
            raise ValueError("there are fewer ranks than it names")
        return self


class _Cause(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    exit_code: int
    type: Name
    message: Text
    reason: Text
    step: Count | None


class _End(_Part):
    rank: Count
    pid: Count
    signal: Annotated[int, Field(ge=1, le=64)] | None
    exit_code: Code | None
    cause: _Cause | None = None
    host: Name | None = None
    doing: Name | None = None
    starved: bool = False


class _Ended(_Part):
    attempt: Count
    code: Code
    ends: list[_End]
    lowered: bool = False


class _Nothing(_Part):
    """An empty object."""


class _Vote(_Part):
    ready: Count
    offered: Count
    last: _Ended | _Nothing
    held: list[_InventoryEntry]
    attempt: Count


class _Choice(_Part):
    step: Count
    generation: Count
    way: Count
    files: list[Annotated[list[Any], AfterValidator(lambda row: _file(row))]]


def _file(row: list[Any]) -> list[Any]:
    if len(row) != 2 or not _is(row[0], int) or not 0 <= row[0] < 1 << 16:
        raise ValueError("it names no node and file")
    _InventoryEntry.model_validate(row[1])
    return row


class _Budget(_Part):
    failures: Count = 0
    reached: Count = 0
    committed: Count = 0
    first: Count = 1
    crash: Crash = Field(default_factory=lambda: ["", 0])


class _Start(_Part):
    attempt: Count
    epoch: Epoch
    division: Count
    seats: Annotated[list[Node], Field(min_length=1)]
    ranks: Annotated[list[Ranks], Field(min_length=1)]
    step: Count
    kept: _Choice | None
    budget: _Budget
    slots: Annotated[int, Field(ge=1, le=3)]

    @model_validator(mode="after")
    def _agrees(self) -> "_Start":
        if len(self.seats) != len(self.ranks) or len(set(self.seats)) < len(self.seats):
            raise ValueError("it does not say for each seat which node has it and how many ranks that starts")
        return self


class _Policy(_Part):
    nodes: Ranks
    max_restarts: Count
    on_lost_node: list[Literal["replace", "shrink", "wait"]]
    wait_s: float
    grow: bool
    same_crash: Count
    group: Ranks
    replicate_every: Count
    least: Ranks


class _Offer(_Part):
    division: Count
    slots: Annotated[list[Slot], Field(min_length=1)]
    seats: Annotated[list[Node], Field(min_length=1)]
    policy: _Policy
    config: Text = ""
    sign: Name | None = None
    data: dict[str, Any] = {}
    weights: Any = None
    world: Ranks = 1
    faults: list[dict[str, Any]] = []
    attempt: Count = 1
    unit: Name = ""
    steps: Count = 0

    @model_validator(mode="after")
    def _agrees(self) -> "_Offer":
        if len(self.seats) != len(self.slots) or not all(0 < ranks < 1 << 20 for ranks, _ in self.slots):
            raise ValueError("it does not say for each slot which node has it and how many ranks that starts")
        return self


class _Pulses(_Part):
    attempt: Count
    beats: list[ProgressRow]
    signs: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], ProcessStatusRow]
    patience: HangTimeoutsRow


class _Examination(_Part):
    """What node 0 offers where nodes are looked at together, and nothing is trained."""

    secret: Name
    peers: list[Echo] = []


class _Result(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    host: Name
    verdict: Name
    ways: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], dict[str, Any]]


class _Answer(_Part):
    held: list[_InventoryEntry] = []
    echo: Echo | None = None
    result: _Result | None = None


def _record(**fields: Any) -> type[BaseModel]:
    """A kind of message: its fields, and for those that may be left out what is meant then."""
    wanted: Any = {name: kind if isinstance(kind, tuple) else (kind, ...) for name, kind in fields.items()}
    return create_model("_Record", __base__=_Part, **wanted)


# All that nodes of a job say once they have said who they are, by the first field of each record.
_RECORDS = {
    "gone": _record(gone=Epoch),
    "roster": _record(roster=_MemberList),
    "follow": _record(follow=Epoch, ballot=_Vote | None),
    "offer": _record(offer=_Offer | _Examination),
    "start": _record(start=_Start),
    "end": _record(end=Count, known=bool),
    "pause": _record(pause=Count),
    "hung": _record(hung=Count, ranks=list[Blame]),
    "signal": _record(signal=Signal),
    "finish": _record(finish=Code, text=Text),
    "dropped": _record(dropped=Text, code=Code),
    "ended": _record(held=(list[_InventoryEntry], []), ended=_Ended),
    "ready": _record(held=(list[_InventoryEntry], []), ready=Count),
    "unfit": _record(unfit=Text, code=Code),
    "pulses": _record(pulses=_Pulses),
    "stop": _record(stop=Signal, again=(bool, False)),
    "strangers": _record(strangers=Name),
    "answer": _record(answer=_Answer),
    "refused": _record(refused=Text),
    "ping": _record(ping=bool),
    "pong": _record(pong=bool),
    "bye": _record(bye=bool),
}


def _device(row: list[Any]) -> list[Any]:
    if len(row) < 3 or not _is(row[0], str) or not _is(row[1], str) or not _is(row[2], bool):
        raise ValueError("a device is no name, model and whether it has bf16")
    _printable(row[0] + row[1])
    return row


class _At(_Part):
    token: Token
    address: Address
    port: Port
    beats: Port


class _Hello(_Part):
    role: Literal["node"]
    node: Node
    nodes: Ranks
    host: Name
    pid: Count
    devices: list[Annotated[list[Any], AfterValidator(lambda row: _device(row))]]
    versions: dict[Name, Name]
    recipe: dict[Name, Any]
    at: _At | None = None

    @model_validator(mode="after")
    def _agrees(self) -> "_Hello":
        if self.devices and self.at is None:  # nodes that only look at each other have none, and are no members
            raise ValueError("it does not say where it is called")
        return self


def find_message_problem(message: Message) -> str | None:
    """What is wrong with what a node says, in a few words; None for nothing."""
    record = next((_RECORDS[name] for name in message if name in _RECORDS), None)
    return "no message that is known" if record is None else _problem(record, message)


def find_hello_problem(hello: Message) -> str | None:
    """The same of what a node says of itself."""
    return _problem(_Hello, hello)


def _problem(schema: type[BaseModel], message: Message) -> str | None:
    try:
        schema.model_validate(message)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ascii(".".join(str(part) for part in first["loc"]))[1:-1]  # it may hold what no terminal should see
        return f"{where[:MAX_SHOWN]}: {first['msg'][:MAX_SHOWN]}" if where else first["msg"][:MAX_SHOWN]
    except RecursionError:
        return "it is nested too deeply"
    return None
