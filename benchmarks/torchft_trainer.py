"""A replica that trains by torchft's Manager and DistributedDataParallel, and the lighthouse of all of them.

It trains Phalanx's model on Phalanx's batches, each replica on its own part of each. Whoever comes back gets the state
by HTTP from a replica that lives; where none does, from the disk. torchft 0.2 binds servers of its own to all
interfaces: here they are bound to the loopback alone.
"""

import copy
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torchft.manager
from torch import Tensor, nn
from torch.distributed import GradBucket, TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing import HTTPTransport, http_transport
from torchft.coordination import LighthouseServer, ManagerServer

from benchmarks.peers import SEED, own_loss, weights
from benchmarks.torchft_peer import (
    HEARTBEAT_TIMEOUT_MS,
    JOB,
    JOIN_TIMEOUT_MS,
    LIGHTHOUSE,
    LOOPBACK,
    QUORUM_TICK_MS,
    lines_of,
)
from phalanx.data.loader import Loader
from phalanx.data.packing import PackingOptions, make_rows
from phalanx.data.record_files import TokenFile
from phalanx.layout import balance
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.llama import Llama
from phalanx.optim.lr_schedule import learning_rate
from phalanx.system import accelerator
from phalanx.tasks.language import CausalLMTask

CPU = torch.device("cpu")
# Those of torchft's own example for Gloo.
CONNECTED, DONE = timedelta(seconds=5), timedelta(seconds=30)


def lighthouse() -> None:
    """Serve until killed; the address lies in the run's folder then."""
    folder = Path(sys.argv[1])
    server = LighthouseServer(
        bind=f"{LOOPBACK}:0",
        min_replicas=1,
        join_timeout_ms=JOIN_TIMEOUT_MS,
        quorum_tick_ms=QUORUM_TICK_MS,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
    )
    unfinished = folder / f"{LIGHTHOUSE}.tmp"
    unfinished.write_text(f"http://{LOOPBACK}:{server.address().rpartition(':')[2]}")
    unfinished.replace(folder / LIGHTHOUSE)
    while True:
        signal.pause()


class LoopbackServer(ThreadingHTTPServer):
    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        super().__init__((LOOPBACK, address[1]), handler)


class Transport(HTTPTransport):
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self._server.socket.getsockname()[1]}/checkpoint/"


class Replicated(DistributedDataParallel):
    @staticmethod
    def _comm_hook(manager: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        # torchft 0.2's own hook fails an assertion in the replicas that live when another one is lost, and ends them
        # too. What is in the buffer then does not matter: the step is dropped.
        manager.allreduce(bucket.buffer()).wait()
        reduced: torch.futures.Future[Tensor] = torch.futures.Future()
        reduced.set_result(bucket.buffer())
        return reduced


def manager_server(**words: Any) -> Any:
    return ManagerServer(**words | {"bind": f"{LOOPBACK}:0"})


def own_store() -> tuple[TCPStore, int]:
    """A store on the loopback interface, and its port."""
    listener = socket.create_server((LOOPBACK, 0))
    port = int(listener.getsockname()[1])
    fd = listener.detach()
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=fd), port


def manager_of(replica: int, port: int, load: Callable[[Any], None], state: Callable[[], Any]) -> Any:
    torchft.manager.ManagerServer = manager_server
    http_transport._IPv6HTTPServer = LoopbackServer
    return Manager(
        pg=ProcessGroupGloo(timeout=CONNECTED),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=DONE,
        rank=0,
        world_size=1,
        store_addr=LOOPBACK,
        store_port=port,
        replica_id=f"replica_{replica}",
        hostname=LOOPBACK,
        checkpoint_transport=Transport(timeout=DONE, num_chunks=0),
        init_sync=False,  # all have drawn the same weights
    )


def inputs_of(job: dict[str, Any], replica: int) -> Callable[[int], dict[str, Tensor]]:
    """A replica's part of the batch of a step, of which the first is 0. What belongs to one that is lost is left out:
    so torchft's own sampler has it."""
    replicas, batch = job["replicas"], job["global_batch"]
    rows = make_rows(TokenFile(Path(job["tokens"])), PackingOptions(job["seq_len"]), SEED)
    loader, task = Loader([(rows, 1.0)], batch, SEED, replica), CausalLMTask(job["seq_len"])
    division = balance.Division((batch // replicas,) * replicas, 1)

    def inputs(step: int) -> dict[str, Tensor]:
        [samples] = loader.batches(step, division)
        return task.collate(samples).inputs

    return inputs


def train() -> None:
    """Train until killed."""
    folder, replica = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads((folder / JOB).read_text())
    optim: Any = SimpleNamespace(**job["optim"])
    inputs = inputs_of(job, replica)
    accelerator.set_device(CPU, accelerator.threads_per_rank(0, job["replicas"]))
    spec = ModelSpec(**job["spec"])
    with CPU:
        model = Llama(spec).train()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": adamw.state_dict()}

    def load(known: dict[str, Any]) -> None:
        model.load_state_dict(known["model"])
        adamw.load_state_dict(known["optim"])

    saved, checkpoint = None, folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        load(saved["user"])
    else:
        model.load_state_dict(dict(weights(spec, CPU)))
    _store, port = own_store()  # ends with this process
    manager = manager_of(replica, port, load, state)
    if saved is not None:
        manager.load_state_dict(saved["torchft"])
    wrapped, optimizer = Replicated(manager, model), Optimizer(manager, adamw)
    together(folder, replica, job["replicas"])

    saving, last = ThreadPoolExecutor(1), None
    with open(lines_of(folder, replica), "ab", buffering=0) as lines:
        while True:
            mine = inputs(manager.current_step())
            for group in adamw.param_groups:
                group["lr"] = learning_rate(optim, manager.current_step() + 1)
            optimizer.zero_grad()
            loss = own_loss(wrapped, mine["tokens"], mine["labels"])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
            before = manager.current_step()  # now that of the others, of one that has come back
            optimizer.step()
            if (step := manager.current_step()) == before:  # another replica was lost meanwhile
                continue
            now, participants = time.time(), manager.num_participants()
            lines.write(line_of(step, participants, float(loss.detach()), now, last))
            last = now
            if step % job["saved_every"] == 0 and manager.participating_rank() == 0:
                copied = copy.deepcopy({"user": state(), "torchft": manager.state_dict()})
                saving.submit(save, copied, checkpoint)


def line_of(step: int, participants: int, loss: float, now: float, last: float | None) -> bytes:
    """What is left of a step that was committed `now`; `last` is when this process committed one before."""
    step_s = None if last is None else now - last
    line = {"step": step, "participants": participants, "loss": loss, "time": now, "step_s": step_s}
    return json.dumps(line).encode() + b"\n"


def save(whole: dict[str, Any], checkpoint: Path) -> None:
    unfinished = checkpoint.with_suffix(f".{os.getpid()}")
    torch.save(whole, unfinished)
    unfinished.replace(checkpoint)


def together(folder: Path, replica: int, replicas: int) -> None:
    """Wait until all replicas have come to here once: those that begin a run begin it with the same step."""
    (folder / f"ready-{replica}").touch()
    while not all((folder / f"ready-{other}").exists() for other in range(replicas)):
        time.sleep(0.005)
