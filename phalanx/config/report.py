"""The knobs of what a run tells others while it trains. None of them defines the loss curve."""

from pydantic import JsonValue

from phalanx.config.fields import Section, Text, knob


class CallbackSection(Section):
    """Python code that is called while a run trains."""

    code: Text | None = knob(None, "a Python file whose class Callback is told of steps, evaluations and checkpoints")
    options: dict[Text, JsonValue] = knob({}, "arguments of that class")


class ReportSection(Section):
    """What is shown."""

    tensorboard: bool = knob(True, "write TensorBoard event files")
    wandb: Text | None = knob(None, "Weights & Biases project to log to; needs the wandb package")
