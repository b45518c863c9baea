# SPDX-License-Identifier: Apache-2.0
"""Judge what the demo measured, and print it."""

# Standard
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

# First Party
from tests.support.serving.client import Completion


@dataclass(frozen=True)
class Measurement:
    """Everything that one demo run measured.

    Attributes:
        runtime: Name of the runtime, see ``runtime.Runtime``.
        transport: How KV travelled: ``SHM``, ``pickle`` or ``None`` if unknown.
        wanted_transport: How it should have.
        chunk_size: Tokens per chunk.
        prompt_tokens: Length of each prompt.
        cold: Completions of the first round.
        warm: Completions of the same prompts in the second round.
        stored_chunks: Chunks in the LMCache server after the cold round.
        stored_bytes: Their bytes.
        restored_tokens: Rise of ``vllm:external_prefix_cache_hits_total``.
        restored_chunks: Chunks that the LMCache server handed out meanwhile.
        cold_hits: The same counter's rise during the cold round.
        local_hits: Prompt tokens that vLLM found in its own cache.
    """

    runtime: str
    transport: str | None
    wanted_transport: str
    chunk_size: int
    prompt_tokens: tuple[int, ...]
    cold: tuple[Completion, ...]
    warm: tuple[Completion, ...]
    stored_chunks: int
    stored_bytes: int
    restored_tokens: int
    restored_chunks: int
    cold_hits: int
    local_hits: int

    @property
    def expected_chunks(self) -> int:
        """Whole chunks in all prompts together: what LMCache keeps."""
        return whole_chunks(self.prompt_tokens, self.chunk_size)

    @property
    def restored_bytes(self) -> int:
        """Bytes that went back to the NPU; every chunk has the same size."""
        if not self.stored_chunks:
            return 0
        return self.restored_chunks * self.stored_bytes // self.stored_chunks


def whole_chunks(prompt_tokens: Sequence[int], chunk_size: int) -> int:
    """Count the whole chunks of several prompts.

    Args:
        prompt_tokens: Length of each prompt in tokens.
        chunk_size: Tokens per chunk.

    Returns:
        Number of chunks; a partial last chunk is never stored.
    """
    return sum(tokens // chunk_size for tokens in prompt_tokens)


def find_problems(result: Measurement) -> list[str]:
    """Compare a measurement with what must hold.

    Args:
        result: The measurement.

    Returns:
        One sentence per deviation; empty when all is well.
    """
    problems = []
    for number, (cold, warm) in enumerate(
        zip(result.cold, result.warm, strict=True), start=1
    ):
        if cold.token_ids != warm.token_ids:
            place = next(
                index
                for index, (a, b) in enumerate(
                    zip(cold.token_ids, warm.token_ids, strict=True)
                )
                if a != b
            )
            problems.append(
                f"prompt {number}: warm output differs from cold at token {place} "
                f"({cold.token_ids[place]} became {warm.token_ids[place]})"
            )
    chunks = result.expected_chunks
    tokens = chunks * result.chunk_size
    for what, wanted, got in (
        ("chunks stored by the cold round", chunks, result.stored_chunks),
        ("tokens restored in the warm round", tokens, result.restored_tokens),
        ("chunks read back in the warm round", chunks, result.restored_chunks),
        ("tokens restored in the cold round", 0, result.cold_hits),
        ("tokens from vLLM's own prefix cache", 0, result.local_hits),
    ):
        if wanted != got:
            problems.append(f"{what}: wanted {wanted}, got {got}")
    if result.transport != result.wanted_transport:
        problems.append(
            f"transport: wanted {result.wanted_transport}, got {result.transport}"
        )
    return problems


def format_table(result: Measurement) -> str:
    """Lay a measurement out for a terminal.

    Args:
        result: The measurement.

    Returns:
        Several lines, without a newline at the end.
    """
    header = (
        f"{'prompt':<8}{'tokens':>8}{'restored':>10}"
        f"{'TTFT cold':>12}{'TTFT warm':>12}{'outputs':>11}"
    )
    lines = [header, "-" * len(header)]
    for number, (tokens, cold, warm) in enumerate(
        zip(result.prompt_tokens, result.cold, result.warm, strict=True), start=1
    ):
        equal = "equal" if cold.token_ids == warm.token_ids else "DIFFERENT"
        lines.append(
            f"{number:<8}{tokens:>8}{warm.cached_tokens:>10}"
            f"{_ms(cold.ttft_s):>12}{_ms(warm.ttft_s):>12}{equal:>11}"
        )
    lines.append("-" * len(header))
    cold_ttft = median(completion.ttft_s for completion in result.cold)
    warm_ttft = median(completion.ttft_s for completion in result.warm)
    same = sum(
        cold.token_ids == warm.token_ids
        for cold, warm in zip(result.cold, result.warm, strict=True)
    )
    expected = result.expected_chunks * result.chunk_size
    transport = {"SHM": "shared memory", "pickle": "pickle"}
    stored = result.stored_chunks * result.chunk_size
    for label, value in (
        ("tokens stored", f"{stored:,} of {sum(result.prompt_tokens):,}"),
        ("tokens restored", f"{result.restored_tokens:,} of {expected:,}"),
        ("bytes stored", _mib(result.stored_bytes)),
        ("bytes restored", _mib(result.restored_bytes)),
        ("TTFT cold, median", _ms(cold_ttft)),
        ("TTFT warm, median", f"{_ms(warm_ttft)} ({cold_ttft / warm_ttft:.1f} x)"),
        ("outputs equal", f"{same} of {len(result.cold)}"),
        ("transport", transport.get(result.transport or "", "unknown")),
        ("runtime", result.runtime),
    ):
        lines.append(f"{label:<20}{value}")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB ({count:,} bytes)"
