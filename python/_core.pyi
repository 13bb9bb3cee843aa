"""The Rust core: scheduler, prefix tree and detokenizer of one engine.

Every method that may take longer than 100 us releases the GIL. A `Core` may be used from any
thread; calls are serialised by one lock.
"""

from typing import Final, final

from typing_extensions import Buffer

__all__ = [
    "VERSION",
    "Core",
    "CoreError",
    "CpuAttentionBench",
    "CpuLinearBench",
    "CpuModel",
    "CpuPopulation",
    "IntegrityError",
    "Router",
    "RouterError",
    "cpu_block_kinds",
    "cpu_isas",
    "serve_router",
    "shared_prefix_trace",
    "simulate_fleet",
]

VERSION: Final[str]

class CoreError(Exception):
    """The core was given something it cannot use (a malformed message, a wrong step)."""

class IntegrityError(CoreError):
    """An invariant of the scheduler or the prefix tree does not hold: a bug."""

@final
class Core:
    """One engine's scheduler.

    `docs/plan.md` describes the blocks, `engine/messages.py` the messages.
    """

    def __new__(cls, config: bytes) -> Core:
        """Build a core.

        Args:
            config: JSON object, the fields of `engine.core_config.CoreConfig`; unknown keys are
                errors.

        Raises:
            CoreError: a value is out of range, or the tokenizer has a decoder that this build does
                not know.
        """

    def submit(self, client: int, message: bytes, now: float) -> int | None:
        """Queue a request, or refuse it: either way an event follows (see `ready`).

        Args:
            client: number of the client; its events come back under it.
            message: msgpack of `engine.messages.Submit`.
            now: unix seconds.

        Returns:
            The request's id if it must be prepared (see `ready`), else None.

        Raises:
            CoreError: the message is malformed; nothing was queued and no event follows.
        """

    def ready(self, request: int, error: str | None = None, *, is_fault: bool = False) -> None:
        """Release a request that had to be prepared; with `error`, refuse it.

        It is the request's own fault (400), or with `is_fault` one of the engine (503).

        The request's first event, `Accepted` or `Refused`, comes with this call. Unknown ids are
        ignored: the request may have been aborted meanwhile.
        """

    def is_live(self, request: int) -> bool:
        """Whether a request that had to be prepared, by the id from `submit`, has not ended."""

    def abort(self, client: int | None, key: int | None, rid: str | None) -> int:
        """End requests.

        Selected by client and key, by client alone (all of its requests), or by rid (a request, or
        one sample as `rid_k`); all None means everything.

        Takes effect now for what waits, at the next commit for what is in a step in flight. Events
        follow. A rid matches exactly, as a request before it matches as a sample.

        Returns:
            How many requests it met; 0 if there was none.

        Raises:
            CoreError: another combination of arguments.
        """

    def plan(self, now: float, arena: Buffer) -> int | None:
        """Write the next step's plan into `arena`.

        Args:
            now: unix seconds.
            arena: writable, contiguous bytes, 8-byte aligned, at least `arena_bytes` of the config.
                No other thread may use it during the call.

        Returns:
            The step's id, or None when nothing can be computed now: there is no work, or what there
            is waits for a commit, for `ready`, or for memory that steps in flight will give back.

        Raises:
            CoreError: more steps are in flight than the configured depth; the arena is too small.
            BufferError: the arena is not writable or not contiguous.
        """

    def commit(self, now: float, result: Buffer) -> None:
        """Take the result of the oldest step in flight.

        Args:
            now: unix seconds.
            result: contiguous bytes; no other thread may write to them during the call.

        Raises:
            CoreError: the block is malformed, or not of that step; nothing was committed.
        """

    def take_events(self) -> list[tuple[int, bytes]]:
        """Events since the last call: `(client, msgpack array)`, one entry per client."""

    def take_entered(self) -> list[tuple[int, int]]:
        """Requests whose first row is in a plan made since the last call: client and key each."""

    def has_work(self) -> bool:
        """Whether a request waits or runs or a step is in flight."""

    def next_deadline(self) -> float | None:
        """When the next waiting request times out (unix seconds): `plan` must be called then."""

    def flush_cache(self) -> bool:
        """Forget every cached prefix; False (and nothing done) while requests run or wait."""

    def set_weight_epoch(self, epoch: int) -> bool:
        """Mark new weights: cached prefixes of older epochs never match again.

        False (and nothing done) while a step is in flight.
        """

    def stats(self) -> dict[str, float]:
        """Gauges and cumulative counters by name (`rust/scheduler/src/stats.rs` lists them)."""

    def check_integrity(self) -> None:
        """Check every invariant of scheduler and tree.

        Raises:
            IntegrityError: one does not hold; the message says which.
        """

class RouterError(Exception):
    """The router cannot choose or start, or knows no such worker or setting."""

@final
class Router:
    """Chooses a worker for each request by load (in tokens) and probable cache contents.

    Without clock: `now` is in seconds and never decreases. May be used from any thread.
    """

    def __new__(cls, config: bytes, block_tokens: int = 16) -> Router:
        """Build a router without workers.

        Args:
            config: JSON object, fields of `Config` in `rust/router/src/core/config.rs`; `{}` is the
                cache-aware default.
            block_tokens: granularity at which prefixes are compared, the page size for instance.

        Raises:
            RouterError: an unknown field, or a value out of range.
        """

    def add_worker(self, name: str, capacity_tokens: int) -> int:
        """Add a worker that is ready.

        Args:
            name: routers that know the same names place cold prompts alike.
            capacity_tokens: what its cache holds.

        Returns:
            Its id, never used again.

        Raises:
            RouterError: the name is taken.
        """

    def remove_worker(self, worker: int) -> None:
        """Forget a worker; its tickets end without effect. `RouterError` if there is none."""

    def set_ready(self, worker: int, ready: bool) -> None:
        """Whether it gets requests. `RouterError` if there is no such worker."""

    def forget_cache(self, worker: int) -> None:
        """Its cache was lost. `RouterError` if there is no such worker."""

    def select(
        self,
        token_ids: Buffer,
        now: float,
        *,
        namespace: bytes | None = None,
        only: list[int] | None = None,
        exclude: list[int] = ...,
        session: bytes | None = None,
    ) -> tuple[int, int, int]:
        """Choose a worker; the request counts in its load from now until `finished`.

        Args:
            token_ids: the prompt, contiguous bytes of 32-bit ids in the machine's order.
            now: seconds.
            namespace: what does not share caches differs here (model, adapter, salt).
            only: if given, only these may be chosen.
            exclude: those that were tried already.
            session: what the `session` policy goes by.

        Returns:
            The worker, a ticket, and how many prompt tokens its cache probably holds.

        Raises:
            RouterError: nobody may be chosen.
        """

    def started(self, ticket: int) -> None:
        """The answer has begun: the prompt is computed. Unknown tickets are ignored."""

    def finished(self, ticket: int, outcome: str, now: float) -> None:
        """The request has ended. Unknown tickets are ignored.

        Args:
            ticket: of `select`.
            outcome: `completed`, `failed` (the worker broke), `refused` (it would not take it) or
                `cancelled` (the client went away).
            now: seconds.

        Raises:
            RouterError: another outcome.
        """

    def report(
        self,
        worker: int,
        now: float,
        *,
        running: int,
        waiting: int,
        waiting_uncached_tokens: int,
        kv_used: float,
    ) -> None:
        """What the worker said about its load, which others may cause too.

        Raises:
            RouterError: there is no such worker.
        """

    def loads(self) -> list[dict[str, int | bool]]:
        """Each worker: `worker, ready, in_flight, running, prefill_tokens, selected`."""

def simulate_fleet(config: bytes, trace: str) -> bytes:
    """Serve a trace with a simulated fleet of engines (docs/fleet.md). Releases the GIL.

    Args:
        config: JSON object, fields of `FleetConfig` in `rust/router/src/sim/config.rs`.
        trace: one JSON object per line: `timestamp` (ms), `input_length`, `output_length`,
            `hash_ids` (names of the prompt's blocks; equal names, equal tokens).

    Returns:
        JSON object, fields of `Summary` in `rust/router/src/sim/summary.rs`; the same arguments
        give the same bytes.

    Raises:
        ValueError: a setting or a line is unusable; the message names it.
    """

def shared_prefix_trace(config: bytes) -> str:
    """Make a trace of conversations in groups that share prefixes.

    Args:
        config: JSON object, fields of `SharedPrefix` in `rust/router/src/sim/workload.rs`.

    Raises:
        ValueError: a setting is unusable.
    """

@final
class CpuModel:
    """One model on the CPU kernels: its weights by number, and then its program.

    A tensor is a contiguous buffer of bytes holding elements of the model's dtype. Weights may be
    loaded at any time, also while a program runs; a step computes on what it finds.
    """

    def __new__(
        cls,
        dtype: str,
        isa: str | None = None,
        num_threads: int | None = None,
        quantised: bool = False,
    ) -> CpuModel:
        """Start the threads.

        Args:
            dtype: bfloat16 or float32.
            isa: avx512_bf16, avx2 or portable; None: the fastest that the processor has.
            num_threads: None: as many as affinity mask and cgroup quota allow.
            quantised: store the weights of linears and embeddings as blocks of small integers;
                operations on them read quantised buffers.

        Raises:
            ValueError: there are no kernels for the dtype, or the processor lacks the instructions.
        """

    @property
    def isa(self) -> str:
        """The instruction set in use."""

    @property
    def num_threads(self) -> int:
        """Threads that compute, the caller's included."""

    def add_embedding(self, num_rows: int, width: int, scale: float = 1.0) -> int:
        """Add a token embedding of zeros, whose rows are looked up times `scale`; its number."""

    def add_norm(self, width: int, epsilon: float, offset: float = 0.0) -> int:
        """Add an RMS norm, which multiplies by its weight plus `offset`; its number."""

    def add_sinks(self, num_heads: int) -> int:
        """Add attention sinks of zeros; their number."""

    def add_linear(self, in_features: int, parts: list[int], bias: bool) -> int:
        """Add a fused linear with these many outputs per part; its number."""

    def add_rotary(self, half: int, cos: bytes, sin: bytes) -> int:
        """Add tables `[positions, half]` float32; their number."""

    def load_embedding(self, index: int, tensor: Buffer) -> None:
        """Load a table."""

    def load_norm(self, index: int, tensor: Buffer) -> None:
        """Load a norm's weight."""

    def load_sinks(self, index: int, tensor: Buffer) -> None:
        """Load sinks' scores."""

    def load_linear(self, index: int, part: int, tensor: Buffer, kind: str | None = None) -> None:
        """Pack a part's weight `[outputs, in_features]`.

        Args:
            index: the linear.
            part: its part.
            tensor: elements or, if the model is quantised, a GGUF file's rows of blocks.
            kind: bfloat16, float32 or one of `cpu_block_kinds`; None: the model's dtype.

        Raises:
            ValueError: the tensor has another size, or cannot be quantised.
        """

    def load_bias(self, index: int, part: int, tensor: Buffer) -> None:
        """Load a part's bias."""

    def embedding_linear(self, index: int) -> int | None:
        """The linear whose weight is the table, which is loaded instead; None: not quantised."""

    def embedding_bytes(self, index: int) -> int:
        """Memory of an embedding."""

    def norm_bytes(self, index: int) -> int:
        """Memory of a norm."""

    def sinks_bytes(self, index: int) -> int:
        """Memory of sinks."""

    def linear_bytes(self, index: int) -> int:
        """Memory of a linear."""

    def can_fuse_gate(self, index: int) -> bool:
        """Whether the halves of the linear's output can be gated as they are computed."""

    def start(
        self,
        buffers: list[tuple[str, int]],
        operations: list[tuple[str, list[int | None]]],
        head: tuple[int, int, int, int | None],
        kv: tuple[int, int, int, int, int],
        limits: tuple[int, int],
    ) -> None:
        """Take the program and allocate what lives between steps.

        Args:
            buffers: `(wide or operand, width)` by number.
            operations: `(name, numbers of weights and buffers)`; `rust/cpu/src/recording.rs` lists
                them.
            head: buffer of the final hidden states, norm, linear, and the bits of the logits' soft
                cap as a float32, if there is one.
            kv: layers, kv heads, head_dim, pages, page size.
            limits: slots, longest sequence.

        Raises:
            ValueError: numbers or widths do not fit; the model is unusable then.
        """

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV pool."""

    def population(self) -> CpuPopulation:
        """The KV pool's memory, to be taken before its pages are written.

        Raises:
            ValueError: the model has no program yet.
        """

    def forward(self, arena: Buffer) -> None:
        """Compute the plan at the start of the arena, all but its samples.

        Raises:
            ValueError: the plan is malformed or contradicts the limits; nothing has changed then.
        """

    def sample(self, step: int, masks: Buffer | None = None) -> bytes:
        """Draw the tokens of the plan that `forward` took last; the result block.

        Args:
            step: the plan's id.
            masks: bytes of `[samples, ceil(vocabulary / 32)]` int32.

        Raises:
            ValueError: another step is pending, a slot is not open, or a mask is missing; no slot
                has changed then.
        """

@final
class CpuPopulation:
    """Takes physical memory for a KV pool in the order in which its pages are handed out.

    It does not keep the pool alive, and changes nothing that is in it.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""

    @property
    def bytes_ahead(self) -> int:
        """Bytes taken beyond all pages that were written."""

    @property
    def idle_s(self) -> float:
        """Seconds since the last step, 0 while one runs; infinite before the first."""

    def advance(self, num_bytes: int) -> bool:
        """Take about so many bytes more, in a thread of lowest priority, and wait for it.

        Returns:
            False if nothing is left to take: all is there, or the pool is gone.

        Raises:
            OSError: the system refuses, or cannot do it (before Linux 5.14).
        """

@final
class CpuLinearBench:
    """Packed linears one after another, for measurements."""

    def __new__(
        cls,
        dtype: str,
        shapes: list[tuple[int, int]],
        isa: str | None = None,
        num_threads: int | None = None,
        blocks: str | None = None,
    ) -> CpuLinearBench:
        """Allocate weights of `(outputs, inputs)` each, stored as `blocks` if given."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""

    def linears(self, num_rows: int) -> float:
        """Seconds to compute all linears once on that many rows."""

    def streaming_read(self) -> float:
        """Seconds to read all weights once."""

@final
class CpuAttentionBench:
    """Attention of whole steps, all layers one after another, for measurements."""

    def __new__(
        cls,
        dtype: str,
        shape: tuple[int, int, int, int],
        num_tokens: int,
        isa: str | None = None,
        num_threads: int | None = None,
    ) -> CpuAttentionBench:
        """Allocate a pool of `num_tokens` positions.

        Args:
            dtype: bfloat16 or float32.
            shape: layers, heads of queries, heads of keys and values, elements of a head.
            num_tokens: positions, pages of 16.
            isa: None: the fastest.
            num_threads: None: as many as affinity mask and cgroup quota allow.
        """

    def attend(self, rows: list[tuple[int, int]], shared_tokens: int) -> float:
        """Seconds to attend in every layer.

        Args:
            rows: scheduled and computed tokens of each.
            shared_tokens: leading tokens of all rows that lie in the same pages.
        """

def cpu_block_kinds() -> list[str]:
    """GGUF types that the CPU kernels pack as they are stored."""

def cpu_isas() -> list[str]:
    """Instruction sets that this processor has, fastest first."""

def serve_router(config: bytes) -> None:
    """Run `engine-router` until SIGTERM or SIGINT, and as long as requests in flight may take.

    Handles both signals itself; a second one ends it at once. Must be called in the main thread of
    a process of its own.

    Args:
        config: JSON object with every field of `Config` in `rust/router/src/proxy/config.rs`.

    Raises:
        RouterError: a setting is missing, unknown or out of range; the port cannot be had.
    """
