# SPDX-License-Identifier: Apache-2.0
"""``lmcache server`` and ``vllm serve``, started as the user page says."""

# Standard
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
import json
import random
import socket
import sys
import time

# First Party
from tests.support.serving import client
from tests.support.serving.processes import ServerFailedError, ServerProcess

HOST = "127.0.0.1"
CONNECTOR = "LMCacheMPConnector"
CONNECTOR_MODULE = "lmcache.integration.vllm.lmcache_mp_connector"
# LMCache puts this before the name given with --shm-name.
SHM_PREFIX = "lmcache_l1_pool_"
SHM_FOLDER = Path("/dev/shm")
# The ports that the kernel hands out to whoever asks for any.
KERNEL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT = 10240

_chance = random.SystemRandom()

OnWait = Callable[[float], None]


@dataclass(frozen=True)
class CacheServerConfig:
    """Settings of one ``lmcache server``.

    Attributes:
        chunk_size: Tokens per chunk; a multiple of the engine's block size.
        transfer_mode: ``engine_driven`` or ``auto``; RBLN has no other.
        shm_name: Name of the shared-memory segment; empty sends KV by pickle.
        l1_size_gb: Host memory for KV, in GiB.
        extra_args: More arguments.
    """

    chunk_size: int
    transfer_mode: str = "engine_driven"
    shm_name: str = ""
    l1_size_gb: float = 1.0
    extra_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one ``vllm serve``.

    Attributes:
        model: Folder of the model.
        block_size: Tokens per KV block.
        max_model_len: Longest prompt and answer together, in tokens.
        max_seqs: Requests computed at the same time.
        num_blocks: KV blocks on the NPU; ``None`` leaves it to vLLM.
        max_batched_tokens: Prompt tokens computed in one step.
        connector: Name of the connector class.
        connector_module: Module that holds it; ``None`` for one that vLLM knows.
        connector_config: More entries for ``kv_connector_extra_config``.
        prefix_caching: Whether vLLM keeps prefixes on the NPU too; ``None`` leaves it
            to vLLM, which does.
        load_failure_policy: What vLLM does with a request whose load failed,
            ``recompute`` or ``fail``; ``None`` leaves it to vLLM.
        inside_multi: Whether the connector is inside of vLLM's ``MultiConnector``.
        extra_args: More arguments.
    """

    model: Path
    block_size: int
    max_model_len: int
    max_seqs: int
    num_blocks: int | None
    max_batched_tokens: int = 256
    connector: str = CONNECTOR
    connector_module: str | None = CONNECTOR_MODULE
    connector_config: Mapping[str, Any] = field(default_factory=dict)
    prefix_caching: bool | None = False
    load_failure_policy: str | None = None
    inside_multi: bool = False
    extra_args: tuple[str, ...] = ()


def free_port() -> int:
    """Find a TCP port that nobody listens on.

    A server takes seconds to bind it. Until then it must not go to another program that
    asks the kernel for any port, so it lies below those that the kernel hands out.
    """
    first = int(KERNEL_PORTS.read_text().split()[0])
    tries = range(100) if first > LOWEST_PORT else ()
    ports = [_chance.randrange(LOWEST_PORT, first) for _ in tries]
    for port in ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            return port
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class CacheServer:
    """One ``lmcache server``.

    Args:
        config: Its settings.
        env: Its environment.
        folder: Where its log goes, and its working directory.
        port: Port for the engine; a free one by default.
        name: Name of the log file and in messages.
    """

    def __init__(
        self,
        config: CacheServerConfig,
        env: Mapping[str, str],
        folder: Path,
        port: int | None = None,
        name: str = "lmcache-server",
    ) -> None:
        self.config = config
        self.port = port or free_port()
        self.http_port = free_port()
        self.process = ServerProcess(
            "lmcache server", self._command(), env, folder / f"{name}.log", folder
        )

    def _command(self) -> list[str]:
        config = self.config
        command = [
            _program("lmcache"),
            "server",
            *("--host", HOST),
            *("--port", str(self.port)),
            *("--http-host", HOST),
            *("--http-port", str(self.http_port)),
            *("--l1-size-gb", f"{config.l1_size_gb:g}"),
            *("--eviction-policy", "LRU"),
            *("--chunk-size", str(config.chunk_size)),
            *("--supported-transfer-mode", config.transfer_mode),
        ]
        if config.shm_name:
            command += ["--shm-name", config.shm_name]
        return [*command, *config.extra_args]

    @property
    def segment(self) -> Path | None:
        """File of the shared-memory segment, or ``None`` when pickle is used."""
        name = self.config.shm_name
        return SHM_FOLDER / f"{SHM_PREFIX}{name}" if name else None

    def start(self) -> None:
        """Start it and return at once."""
        self.process.start()

    def wait_ready(
        self, timeout_s: float = 300.0, on_wait: OnWait | None = None
    ) -> float:
        """Wait until it answers; returns the seconds waited.

        Raises:
            ServerFailedError: If it dies or does not answer in time.
        """
        return self.process.wait_ready(self._is_ready, timeout_s, on_wait)

    def _is_ready(self) -> bool:
        if not client.answers(f"http://{HOST}:{self.http_port}/healthcheck"):
            return False
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex((HOST, self.port)) == 0

    def counters(self) -> client.Counters:
        """Read its Prometheus page."""
        return client.read_counters(f"http://{HOST}:{self.http_port}/metrics")

    def memory(self) -> dict[str, Any]:
        """Read the state of its host memory: objects, locks and bytes used."""
        status = client.get_json(f"http://{HOST}:{self.http_port}/status")
        state = status["storage_manager"]["l1_manager"]
        assert isinstance(state, dict)
        return state

    def clear(self) -> None:
        """Forget every stored chunk."""
        client.post_json(f"http://{HOST}:{self.http_port}/cache/clear", {})

    def wait_stored(self, chunks: int, timeout_s: float = 120.0) -> dict[str, Any]:
        """Wait until ``chunks`` chunks are stored and no lock is held.

        The engine answers a request before its last chunks are stored.

        Args:
            chunks: Number of chunks the server must hold.
            timeout_s: Longest wait in seconds.

        Returns:
            The state of the memory.

        Raises:
            ServerFailedError: If it does not get there, with what it holds.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self.process.check_running()
            state = self.memory()
            locks = state["write_locked_count"] + state["read_locked_count"]
            if state["total_object_count"] == chunks and not locks:
                return state
            if time.monotonic() > deadline:
                raise self.process.failure(
                    f"holds {state['total_object_count']} chunks with {locks} locks "
                    f"after {timeout_s:.0f} s; wanted {chunks} chunks and no lock"
                )
            time.sleep(0.1)

    def stop(self) -> None:
        """Stop it and make sure that its shared memory is gone.

        Raises:
            ServerFailedError: If it had to be killed, or left its segment
                behind; the segment is removed in any case.
        """
        polite = self.process.stop()
        segment = self.segment
        if not polite:
            if segment is not None:
                segment.unlink(missing_ok=True)
            raise self.process.failure("did not end on SIGTERM and was killed")
        # A worker may still map it, then the process could not tell it is left over.
        if segment is not None and (
            segment in self.process.leftovers or segment.exists()
        ):
            segment.unlink(missing_ok=True)
            raise self.process.failure(f"left {segment} behind (removed now)")


class Engine:
    """One ``vllm serve`` with its KV cache in LMCache.

    Args:
        config: Its settings.
        cache_port: Port of the LMCache server on this host; ``None`` for a connector
            that has LMCache in process.
        env: Its environment.
        folder: Where its log goes, and its working directory.
        name: Name of the log file and in messages.
    """

    served_name = "rbln-demo"

    def __init__(
        self,
        config: EngineConfig,
        cache_port: int | None,
        env: Mapping[str, str],
        folder: Path,
        name: str = "vllm-serve",
    ) -> None:
        self.config = config
        self.port = free_port()
        self._cache_port = cache_port
        self.process = ServerProcess(
            "vllm serve", self._command(), env, folder / f"{name}.log", folder
        )

    def _command(self) -> list[str]:
        config = self.config
        extra = dict(config.connector_config)
        if self._cache_port is not None:
            address = {
                "lmcache.mp.host": f"tcp://{HOST}",
                "lmcache.mp.port": self._cache_port,
            }
            extra = address | extra
        transfer: dict[str, Any] = {
            "kv_connector": config.connector,
            "kv_role": "kv_both",
        }
        if config.connector_module is not None:
            transfer["kv_connector_module_path"] = config.connector_module
        if extra:
            transfer["kv_connector_extra_config"] = extra
        if config.inside_multi:
            transfer = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [transfer]},
            }
        if config.load_failure_policy is not None:
            transfer["kv_load_failure_policy"] = config.load_failure_policy
        blocks = ("--num-gpu-blocks-override", str(config.num_blocks))
        prefix_caching = {
            None: (),
            # Without it nothing is restored from anywhere else than LMCache.
            False: ("--no-enable-prefix-caching",),
            True: ("--enable-prefix-caching",),
        }[config.prefix_caching]
        return [
            _program("vllm"),
            "serve",
            str(config.model),
            *("--served-model-name", self.served_name),
            *("--host", HOST),
            *("--port", str(self.port)),
            *("--model-impl", "vllm"),
            *("--block-size", str(config.block_size)),
            *("--max-model-len", str(config.max_model_len)),
            *("--max-num-seqs", str(config.max_seqs)),
            *("--max-num-batched-tokens", str(config.max_batched_tokens)),
            *(blocks if config.num_blocks is not None else ()),
            *prefix_caching,
            "--enable-prompt-tokens-details",
            *("--kv-transfer-config", json.dumps(transfer)),
            *config.extra_args,
        ]

    def start(self) -> None:
        """Start it and return at once."""
        self.process.start()

    def wait_ready(
        self, timeout_s: float = 600.0, on_wait: OnWait | None = None
    ) -> float:
        """Wait until it serves; returns the seconds waited.

        Raises:
            ServerFailedError: If it dies or does not serve in time.
        """
        return self.process.wait_ready(
            lambda: client.answers(f"http://{HOST}:{self.port}/health"),
            timeout_s,
            on_wait,
        )

    def counters(self) -> client.Counters:
        """Read its Prometheus page."""
        return client.read_counters(f"http://{HOST}:{self.port}/metrics")

    def complete(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        cache_salt: str | None = None,
    ) -> list[client.Completion]:
        """Answer several prompts sent at the same time.

        Args:
            prompts: Prompts as token ids.
            max_tokens: Number of tokens to generate for each.
            cache_salt: Shares KV with requests of the same salt only.

        Returns:
            The completions in the order of the prompts.

        Raises:
            ServerFailedError: If a request fails because the server died.
            client.RequestFailedError: If it fails for any other reason.
        """
        try:
            return client.complete_together(
                self.port, self.served_name, prompts, max_tokens, cache_salt
            )
        except client.RequestFailedError as error:
            # A dying server fails its requests first; its log says why.
            if self.process.ends_within(5.0):
                raise self.process.failure(f"died: {error}") from error
            raise

    def forget_prefixes(self) -> bool:
        """Forget what is kept on the NPU; needs ``VLLM_SERVER_DEV_MODE=1``.

        Returns:
            Whether it could: blocks of requests and stores under way are kept.
        """
        answer = client.post_json(f"http://{HOST}:{self.port}/reset_prefix_cache", {})
        return bool(answer["success"])

    def stop(self) -> None:
        """Stop it.

        Raises:
            ServerFailedError: If it had to be killed.
        """
        if not self.process.stop():
            raise self.process.failure("did not end on SIGTERM and was killed")


_Running = TypeVar("_Running", CacheServer, Engine)


@contextmanager
def running(server: _Running) -> Iterator[_Running]:
    """Start a server, wait until it answers, and stop it at the end.

    Raises:
        ServerFailedError: If it does not start, or does not stop as it should.
    """
    server.start()
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


@contextmanager
def serving(cache: CacheServer, engine: Engine) -> Iterator[None]:
    """Start both servers, the engine when the other one answers; stop them at the end.

    Raises:
        ServerFailedError: If one does not start, or does not stop as it should.
    """
    with running(cache), running(engine):
        yield


def transport_of(engine_log: str) -> str | None:
    """Read from the engine's log how KV travels to the LMCache server.

    Args:
        engine_log: Log of ``vllm serve``.

    Returns:
        ``SHM`` or ``pickle`` as the worker last registered, ``None`` before.
        A worker that could not map the announced segment counts as ``pickle``.
    """
    transport = None
    for line in engine_log.splitlines():
        if "Creating EngineDrivenContextShm" in line:
            transport = "SHM"
        elif "Creating EngineDrivenContext" in line:
            transport = "pickle"
    return transport


def _program(name: str) -> str:
    """Path of a console script of this Python environment."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise ServerFailedError(
            f"{path} does not exist: install {name} into this environment "
            "(`make demo` does)"
        )
    return str(path)
