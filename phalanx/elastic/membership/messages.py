"""The schema of messages between agents, and validation against it.

An authenticated node may still be broken: damaged memory, or another version of the program. So every message is
validated before use, and a sender of invalid messages is lost, as if its connection had ended. The content of a valid
message is trusted.
"""

import ipaddress
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetPydanticSchema, ValidationError, model_validator

from phalanx.elastic.membership.channel import Message

MAX_SHOWN = 60  # characters of an invalid message that are shown
NONSENSE = "it sent an invalid message ({})"  # why a node is lost that does not keep to the schema

Node = Annotated[int, Field(ge=0, lt=1 << 16)]  # as a sign of life has room for
Epoch = Annotated[int, Field(ge=0, lt=1 << 32)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Ranks = Annotated[int, Field(ge=1, lt=1 << 20)]
Port = Annotated[int, Field(ge=1, lt=1 << 16)]
Code = Annotated[int, Field(ge=-255, le=255)]
Kind = type | tuple[type, ...] | list[type]  # of a value; a list: of such values, or nothing
Name = Annotated[str, Field(max_length=1024), AfterValidator(lambda text: check_printable(text))]
Text = Annotated[str, Field(max_length=1 << 20)]
Token = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Layout = Annotated[str, Field(pattern=r"^(bare|[0-9a-f]{0,128})$")]


def _address(text: str) -> str:
    ipaddress.ip_address(text)  # a name would be looked up, for which an agent has no time
    return text


def check_printable(text: str) -> str:
    if not text.isprintable():  # a terminal might take it for more than text
        raise ValueError("a name holds characters that are not text")
    return text


def _row(*kinds: Kind) -> AfterValidator:
    """A list of these types in this order."""

    def check(row: list[Any]) -> list[Any]:
        if not _fits(row, kinds):
            raise ValueError("the list has values of the wrong type")
        return row

    return AfterValidator(check)


def _fits(row: list[Any], kinds: Sequence[Kind]) -> bool:
    return len(row) == len(kinds) and all(has_kind(value, kind) for value, kind in zip(row, kinds, strict=True))


def has_kind(value: Any, kind: Kind) -> bool:
    if isinstance(kind, list):
        return value is None or (isinstance(value, list) and _fits(value, kind))
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) and not (isinstance(value, float) and math.isnan(value))


Signal = Literal["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGPWR"]
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


class MessagePart(BaseModel):
    """An object in a message: all of its fields, and no others."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Member(MessagePart):
    node: Node
    host: Name
    token: Token
    address: Address
    port: Port
    beats: Port
    devices: Annotated[list[Device], Field(min_length=1)]


class _MemberList(MessagePart):
    epoch: Epoch
    leader: Node
    members: Annotated[list[_Member], Field(min_length=1)]

    @model_validator(mode="after")
    def _agrees(self) -> "_MemberList":
        nodes = [member.node for member in self.members]
        if len(set(nodes)) < len(nodes) or self.leader not in nodes:
            raise ValueError("its members do not have distinct numbers, or do not include the leader")
        return self


class _InventoryEntry(MessagePart):
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
            raise ValueError("it names more ranks than there are")
        return self


class _Cause(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    exit_code: int
    type: Name
    message: Text
    reason: Text
    step: Count | None


class _End(MessagePart):
    rank: Count
    pid: Count
    signal: Annotated[int, Field(ge=1, le=64)] | None
    exit_code: Code | None
    cause: _Cause | None = None
    host: Name | None = None
    doing: Name | None = None
    starved: bool = False


class _Ended(MessagePart):
    attempt: Count
    code: Code
    ends: list[_End]
    lowered: bool = False
    interrupted: bool = False


class _Vote(MessagePart):
    ready: Count
    offered: Count
    last: _Ended | Annotated[Message, Field(max_length=0)]  # nothing has ended yet
    held: list[_InventoryEntry]
    attempt: Count


class _Choice(MessagePart):
    step: Count
    generation: Count
    way: Count
    files: list[Annotated[list[Any], AfterValidator(lambda row: _file(row))]]


def _file(row: list[Any]) -> list[Any]:
    if len(row) != 2 or not has_kind(row[0], int) or not 0 <= row[0] < 1 << 16:
        raise ValueError("it does not name a node and a file")
    _InventoryEntry.model_validate(row[1])
    return row


class _Budget(MessagePart):
    failures: Count = 0
    reached: Count = 0
    committed: Count = 0
    first: Count = 1
    crash: Crash = Field(default_factory=lambda: ["", 0])


class _Start(MessagePart):
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
            raise ValueError("it does not give a node and a number of ranks for each seat")
        return self


class _Policy(MessagePart):
    nodes: Ranks
    max_restarts: Count
    on_lost_node: list[Literal["replace", "shrink", "wait"]]
    wait_s: float
    grow: bool
    same_crash: Count
    group: Ranks
    replicate_every: Count
    least: Ranks


class _Offer(MessagePart):
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
            raise ValueError("it does not give a node and a number of ranks for each slot")
        return self


class _Pulses(MessagePart):
    attempt: Count
    beats: list[ProgressRow]
    signs: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], ProcessStatusRow]
    patience: HangTimeoutsRow


class _Examination(MessagePart):
    """Node 0's offer for a health check of several nodes, without training."""

    secret: Name
    peers: list[Echo] = []


class _Result(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    host: Name
    verdict: Name
    ways: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], dict[str, Any]]


class _Answer(MessagePart):
    echo: Echo | None = None
    result: _Result | None = None


class MessageRecord(MessagePart):
    """Messages between identified nodes of a job; the first field tells the kind."""


def _raw(kind: Any) -> GetPydanticSchema:
    """Field of a message that must be of a type, and is used unchanged: it is passed on, or parsed elsewhere."""
    return GetPydanticSchema(lambda _, make: make(kind))


Inventory = Annotated[list[Message] | None, _raw(list[_InventoryEntry] | None)]


class GoneMessage(MessageRecord):
    gone: Epoch


class MemberListMessage(MessageRecord):
    roster: Annotated[Message, _raw(_MemberList)]


class FollowMessage(MessageRecord):
    follow: Epoch
    ballot: Annotated[Message | None, _raw(_Vote | None)]


class OfferMessage(MessageRecord):
    offer: Annotated[Message, _raw(_Offer | _Examination)]


class StartMessage(MessageRecord):
    start: Annotated[Message, _raw(_Start)]


class EndMessage(MessageRecord):
    end: Count
    known: bool


class PauseMessage(MessageRecord):
    pause: Count


class HungMessage(MessageRecord):
    hung: Count
    ranks: list[Blame]


class SignalMessage(MessageRecord):
    signal: Signal


class FinishMessage(MessageRecord):
    finish: Code
    text: Text


class DroppedMessage(MessageRecord):
    dropped: Text
    code: Code


class EndedMessage(MessageRecord):
    ended: Annotated[Message, _raw(_Ended)]
    held: Inventory = None


class ReadyMessage(MessageRecord):
    ready: Count
    held: Inventory = None


class UnfitMessage(MessageRecord):
    unfit: Text
    code: Code


class ProgressMessage(MessageRecord):
    pulses: Annotated[Message, _raw(_Pulses)]


class StopMessage(MessageRecord):
    stop: Signal
    reason: Text = ""
    again: bool = False


class StrangersMessage(MessageRecord):
    strangers: Name


class AnswerMessage(MessageRecord):
    answer: Annotated[Message, _raw(_Answer)]


class RefusedMessage(MessageRecord):
    refused: Text


class PingMessage(MessageRecord):
    ping: bool


class PongMessage(MessageRecord):
    pong: bool


_KINDS = {next(iter(kind.model_fields)): kind for kind in MessageRecord.__subclasses__()}


def parse_message(message: Message) -> MessageRecord:
    """Validate a node's message. Raises ValueError, with the reason why that node is lost, where it violates the
    schema."""
    kind = next((_KINDS[name] for name in message if name in _KINDS), None)
    wrong = "an unknown message" if kind is None else find_schema_problem(kind, message)
    if wrong is not None:
        raise ValueError(NONSENSE.format(wrong))
    return build_message(message)


def build_message(message: Message) -> MessageRecord:
    """Parse a message of this node to itself, without validation."""
    return next(_KINDS[name] for name in message if name in _KINDS).model_construct(**message)


def find_schema_problem(schema: type[BaseModel], message: Message) -> str | None:
    """Find the first violation of `schema` in a message, in a few words; None without any."""
    try:
        schema.model_validate(message)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ascii(".".join(str(part) for part in first["loc"]))[1:-1]  # it may hold what no terminal should see
        return f"{where[:MAX_SHOWN]}: {first['msg'][:MAX_SHOWN]}" if where else first["msg"][:MAX_SHOWN]
    except RecursionError:
        return "it is nested too deeply"
    return None
