"""What a job is: one frozen dataclass per section of the YAML file, with every check.

The docstring under a field is its reference entry (`docs/config.md` is generated from them). A section checks its own
fields when it is made; `JobConfig.__post_init__` holds the rules that cross sections. Nothing here needs a package.
"""

from dataclasses import dataclass, field
from typing import Literal

from raytrain3d.config_checks import fraction as _fraction
from raytrain3d.config_checks import positive as _positive
from raytrain3d.config_checks import require as _require
from raytrain3d.config_data import DataConfig, EvaluateConfig, EvaluationSetConfig, PhaseConfig, SourceConfig
from raytrain3d.errors import ConfigError

# Of the names from elsewhere, those that others may import from here.
__all__ = ["DataConfig", "EvaluateConfig", "EvaluationSetConfig", "PhaseConfig", "SourceConfig"]

CompileBackend = Literal["none", "inductor", "aot_eager"]
"""What torch.compile hands its graphs to."""
Recompute = Literal["none", "selective", "full"]
"""What a block computes again before its backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Name and place of a run."""

    name: str
    """Name of the run: its directory, its mailbox actor and its metrics carry it. Letters, digits, `.`, `_`, `-`."""
    directory: str = "runs"
    """Directory that holds run directories. Must be absolute (or a URI) when ranks are on several nodes or the driver
    runs in a Ray working directory."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of the rank log files and of the driver's own log lines."""
    trace_interval: int | None = None
    """Steps between those in which every rank records each op (`traces/` in the run directory, read by `raytrain3d
    trace`). Absent: none."""

    def __post_init__(self) -> None:
        _positive("run", trace_interval=self.trace_interval)
        safe = bool(self.name) and all(c.isalnum() or c in "._-" for c in self.name) and self.name[0] not in ".-"
        _require(safe, "run.name", self.name, "use letters, digits, '.', '_' and '-', beginning with a letter or digit")
        _require(bool(self.directory), "run.directory", self.directory, "must name a directory")


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryScalingConfig:
    """Rotary frequency scaling of Llama 3.1 and later (long wavelengths are stretched, short ones kept)."""

    factor: float = 8.0
    """How much the longest wavelengths are stretched."""
    low_frequency_factor: float = 1.0
    """Wavelengths above original_sequence / this are stretched fully."""
    high_frequency_factor: float = 4.0
    """Wavelengths below original_sequence / this are left alone; between the two the stretch is blended."""
    original_sequence: int = 8192
    """Sequence length the frequencies were made for, in tokens."""

    def __post_init__(self) -> None:
        key = "model.rotary_scaling"
        _positive(key, factor=self.factor, original_sequence=self.original_sequence)
        ordered = 0 < self.low_frequency_factor < self.high_frequency_factor
        _require(ordered, f"{key}.low_frequency_factor", self.low_frequency_factor,
                 f"must be above 0 and below high_frequency_factor ({self.high_frequency_factor})")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One transformer. `family` chooses the parts; sizes are in elements."""

    family: Literal["llama", "gpt2"] = "llama"
    """`llama`: RMSNorm, rotary positions, SwiGLU, no biases (Llama 2/3, Mistral, Qwen2, Qwen3, SmolLM).
    `gpt2`: LayerNorm, learned positions, GELU (tanh form), biases everywhere."""
    vocabulary: int
    """Number of token ids."""
    hidden: int
    """Width of the residual stream."""
    blocks: int
    """Number of transformer blocks. Embedding and head are layers of their own beside them."""
    heads: int
    """Number of attention (query) heads."""
    kv_heads: int | None = None
    """Number of key/value heads (grouped-query attention). Default: `heads`."""
    head_size: int | None = None
    """Width of one head. Default: hidden / heads."""
    feed_forward: int
    """Inner width of the feed-forward part."""
    positions: int | None = None
    """Rows of the learned position table (`gpt2` only). Default: train.sequence."""
    norm_epsilon: float = 1e-5
    """Added to the variance inside every norm."""
    rotary_theta: float = 10000.0
    """Base of the rotary wavelengths (`llama` only)."""
    rotary_scaling: RotaryScalingConfig | None = None
    """Llama-3 frequency scaling (`llama` only). Absent: none."""
    qkv_bias: bool = False
    """Bias on the query, key and value projections of the `llama` family (Qwen2)."""
    qk_norm: bool = False
    """RMSNorm over each head's query and key before the rotation (Qwen3)."""
    tied_embeddings: bool = False
    """Use the token embedding as the output projection too."""
    dropout: float = 0.0
    """Dropout on the embedding and on both residual branches of a block."""
    attention_dropout: float = 0.0
    """Dropout on attention probabilities. Above 0 attention runs unfused, since its mask must not depend on layout."""
    initial_std: float = 0.02
    """Standard deviation of the initial weights; projections into the residual stream get it divided by
    sqrt(2 * blocks)."""
    freeze: tuple[str, ...] = ()
    """Layers that are not trained, by name or range: `embedding`, `blocks.0`, `blocks.0-3`, `head`."""
    vocabulary_multiple: int = 64
    """Vocabulary rows on each tensor rank are padded to a multiple of this. Padding rows never get probability and are
    not saved."""
    from_huggingface: str | None = None
    """Directory of a Hugging Face model (`config.json` and safetensors files) whose weights a run starts from, seen by all
    nodes. Its `config.json` then decides the keys from `family` to `tied_embeddings`, also the required ones; those that
    are given must agree with it."""

    def __post_init__(self) -> None:
        _positive("model", vocabulary=self.vocabulary, hidden=self.hidden, blocks=self.blocks, heads=self.heads,
                  kv_heads=self.kv_heads, head_size=self.head_size, feed_forward=self.feed_forward,
                  positions=self.positions, norm_epsilon=self.norm_epsilon, rotary_theta=self.rotary_theta,
                  initial_std=self.initial_std, vocabulary_multiple=self.vocabulary_multiple)
        _fraction("model", dropout=self.dropout, attention_dropout=self.attention_dropout)
        _require(self.head_size is not None or self.hidden % self.heads == 0, "model.heads", self.heads,
                 f"must divide model.hidden ({self.hidden}), or set model.head_size")
        _require(self.heads % self.num_kv_heads == 0, "model.kv_heads", self.kv_heads,
                 f"must divide model.heads ({self.heads})")
        if self.family == "llama":
            _require(self.size_of_head % 2 == 0, "model.head_size", self.size_of_head, "rotary needs an even head size")
            _require(self.positions is None, "model.positions", self.positions, "only the gpt2 family learns positions")
        else:
            for name in ("rotary_scaling", "qkv_bias", "qk_norm"):
                _require(not getattr(self, name), f"model.{name}", getattr(self, name), "belongs to the llama family")
            _require(self.num_kv_heads == self.heads, "model.kv_heads", self.kv_heads,
                     "the gpt2 family has as many key/value heads as heads")
        self.frozen_layers()

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads if self.kv_heads is not None else self.heads

    @property
    def size_of_head(self) -> int:
        return self.head_size if self.head_size is not None else self.hidden // self.heads

    def frozen_layers(self) -> frozenset[int]:
        """Indices of the layers named by `freeze` (0 embedding, 1..blocks, blocks + 1 head)."""
        frozen: set[int] = set()
        for name in self.freeze:
            first, _, last = name.removeprefix("blocks.").partition("-")
            numbers = first.isdigit() and (last or first).isdigit() and name.startswith("blocks.")
            if name == "embedding":
                frozen.add(0)
            elif name == "head":
                frozen.add(self.blocks + 1)
            elif numbers and int(first) <= int(last or first) < self.blocks:
                frozen.update(range(int(first) + 1, int(last or first) + 2))
            else:
                raise ConfigError(f"model.freeze has {name!r}: valid are 'embedding', 'head', 'blocks.N' and "
                                  f"'blocks.N-M' with N <= M < {self.blocks}")
        return frozenset(frozen)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRange:
    """A number of replicas that may change while the job runs."""

    min: int = 1
    """With fewer the job does not start, and waits when it has lost others."""
    max: int
    """Most replicas. The cluster is asked for so many gangs all the time."""

    def __post_init__(self) -> None:
        _require(1 <= self.min <= self.max, "mesh.data", {"min": self.min, "max": self.max},
                 "min must be at least 1 and at most max")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """Ranks along each axis. Their product is the number of ranks."""

    data: int | DataRange = 1
    """Replicas of the model; each is a gang of pipeline x tensor ranks. `{min: 1, max: 4}`: the job starts when the cluster
    has room for `min` of them, goes on without those that it loses and cannot place again, and takes gangs in between two
    steps when there is room. Steps, batches and learning rate stay the same, shares of micro-batches change. Needs
    train.sharding `none`."""
    pipeline: int = 1
    """Pipeline ranks of a replica."""
    tensor: int = 1
    """Ranks that share the matrices of each layer. Keep inside a node."""

    def __post_init__(self) -> None:
        _positive("mesh", data=self.replicas, pipeline=self.pipeline, tensor=self.tensor)

    @property
    def replicas(self) -> int:
        """The most that there may be."""
        return self.data.max if isinstance(self.data, DataRange) else self.data

    @property
    def fewest_replicas(self) -> int:
        return self.data.min if isinstance(self.data, DataRange) else self.data

    @property
    def is_elastic(self) -> bool:
        return self.fewest_replicas < self.replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """How layers and micro-batches are laid over the stages."""

    schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "breadth_first", "zb_h1", "zb_v"] = "1f1b"
    """Order of forwards and backwards. `gpipe` and `1f1b` have the same idle share; `1f1b` holds fewer activations.
    `interleaved` and `breadth_first` divide the idle share by the chunks. `zb_h1` and `zb_v` split the backward and fill
    gaps with weight gradients; `zb_v` has two chunks in a V. `auto`: least simulated step time within
    placement.memory_per_rank_gib."""
    chunks: int | None = None
    """Stages of each pipeline rank. Default: 2 with `interleaved`, `breadth_first` and `zb_v`, else 1. Only `interleaved`
    and `breadth_first` take other numbers; `auto` chooses among schedules of this number if it is given."""
    partition: Literal["flops", "measured", "parameters", "pipedream", "uniform"] = "flops"
    """How layers are split over stages. `flops`: least simulated step time by FLOPs, within placement.memory_per_rank_gib.
    `measured`: the same by the seconds of each layer in the last steps that the run directory has on record, or by FLOPs
    while there are none. `parameters`: even parameters. `pipedream`: least FLOPs of the slowest stage
    (https://arxiv.org/abs/1806.03377). `uniform`: even numbers of blocks, embedding and head on top of them."""
    layers: tuple[int, ...] | None = None
    """Layers of each stage, embedding and head counted, instead of `partition`. One count for each of mesh.pipeline x
    chunks stages, in the order in which a sample passes them. Must add up to blocks + 2."""
    recompute: tuple[Recompute, ...] | None = None
    """`train.recompute` by stage, instead of one for all: early stages hold more micro-batches, so they may need more of
    it. One kind for each stage, in the order of `layers`. A layer that moves takes the kind of its new stage."""

    def __post_init__(self) -> None:
        _positive("pipeline", chunks=self.chunks)
        fixed = {"zb_v": 2, "gpipe": 1, "1f1b": 1, "zb_h1": 1}.get(self.schedule)
        _require(fixed is None or self.num_chunks == fixed, "pipeline.chunks", self.chunks,
                 f"must be {fixed} for pipeline.schedule {self.schedule}; 'interleaved' and 'breadth_first' take any")
        if self.layers is not None:
            _require(all(n >= 1 for n in self.layers), "pipeline.layers", list(self.layers),
                     "every stage keeps at least one layer")

    @property
    def num_chunks(self) -> int:
        """Stages of each pipeline rank; the fewest that `auto` may choose."""
        if self.chunks is not None:
            return self.chunks
        return 2 if self.schedule in ("interleaved", "breadth_first", "zb_v") else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Length, batch and numerics of the run."""

    steps: int
    """Number of optimizer steps."""
    global_batch: int
    """Samples in one step, over all replicas."""
    micro_batch: int = 1
    """Samples that go through the pipeline together."""
    sequence: int
    """Tokens of one sample."""
    seed: int = 1
    """Seed of initial weights, sample order and dropout. Same seed, same run, under any layout."""
    dtype: Literal["fp32", "bf16", "fp64"] = "fp32"
    """Type of weights and activations. bf16 keeps FP32 master weights and accumulates gradients in FP32; fp64 is for
    checking numerics."""
    sequence_parallel: bool = False
    """Divide the residual stream, and so norms, dropout and messages between stages, over the tensor ranks by positions of
    the sequence. Keeps less for the backward and moves a quarter more bytes, since inputs of matrix products are gathered
    again in the backward. mesh.tensor must divide `sequence`."""
    recompute: Recompute = "none"
    """`full` keeps only the input of each block and runs its forward again before its backward; `selective` runs only the
    inside of attention again, which is large where attention is unfused. Results do not change by a bit. Embedding and
    head never run again."""
    recompute_every: int = 1
    """Recompute only in blocks whose number is a multiple of this: 2 is every other one."""
    compile: CompileBackend = "none"
    """Compile the blocks and the loss with torch.compile, once for all blocks of a kind, in the first step. `inductor` fuses
    what surrounds the matrix products into few kernels; on CPUs it needs a C++ compiler. `aot_eager` only captures the
    graphs, to see whether a fault is inductor's. Losses agree with those of `none` within rounding, not to the bit; a run
    that is repeated or resumed still does to the bit, and one with moves where all stages recompute alike. Without dropout
    and `offload_activations` only."""
    collect_interval: int | None = 50
    """Steps between Python's garbage collections, which then come at the same steps on all ranks: each one that comes when
    it likes stops a rank, and all that wait for it. Absent, or with `compile`, whose calls leave tensors to the collector:
    left to Python."""
    sharding: Literal["auto", "none", "optimizer", "gradients", "full"] = "none"
    """What is sharded over the data axis: nothing; optimizer state and master weights (ZeRO-1); gradients, too (ZeRO-2);
    weights, too (ZeRO-3). `gradients` and `full` reduce after every micro-batch. `auto`: the first of these that
    stays within placement.memory_per_rank_gib; none sends more than the next."""
    keep_gathered: Literal["op", "step"] = "op"
    """How long weights that `sharding: full` has gathered stay. Until the `op` is done with the layer: they are gathered
    again for every forward and every backward. Until the `step` is computed: they are gathered once, layer by layer ahead
    of the first forward, and then take as much memory as without sharding."""
    shard_group: int | None = None
    """Neighbouring replicas that share one copy of what is sharded; must divide mesh.data. Groups of them add up their
    gradients, so that gathers stay within a group. Default: mesh.data."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which replicas sum gradients. `bf16` halves what is sent and loses digits. fp64 training sums in fp64 unless
    this is bf16."""
    loss_chunk: int | None = 4096
    """Most tokens whose logits exist at a time: the head goes through a micro-batch in parts of equal size and makes their
    gradients in its forward. Absent: in its backward, and logits of whole micro-batches are kept until then."""
    offload_activations: bool = False
    """Keep what the layers save for their backward in host memory. Their inputs stay on the device, and so does what weight
    gradients of a split backward wait for. The copies take time: first see whether `recompute` does."""
    offload_optimizer: bool = False
    """Keep moments and FP32 master weights in host memory, and update there. Gradients go to the host and weights come
    back, once a step."""
    deterministic: bool = False
    """Keep the replicas' shares of micro-batches fixed, so that a run with the same seed and layout is the same to the
    bit."""
    lease: int = 50
    """Most steps that ranks run before asking the driver again."""

    def __post_init__(self) -> None:
        _positive("train", steps=self.steps, global_batch=self.global_batch, micro_batch=self.micro_batch,
                  sequence=self.sequence, recompute_every=self.recompute_every, loss_chunk=self.loss_chunk, lease=self.lease,
                  shard_group=self.shard_group, collect_interval=self.collect_interval)
        _require(self.compile == "none" or not self.offload_activations, "train.offload_activations",
                 self.offload_activations, "a compiled block keeps its activations itself: set one of it and train.compile")
        _require(self.seed >= 0, "train.seed", self.seed, "must be at least 0")
        _require(self.global_batch % self.micro_batch == 0, "train.global_batch", self.global_batch,
                 f"must be a multiple of train.micro_batch ({self.micro_batch})")

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step, over all replicas."""
        return self.global_batch // self.micro_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW (https://arxiv.org/abs/1711.05101) and gradient clipping."""

    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""
    decay_all: bool = False
    """Decay norms, biases and embeddings too, not only matrices."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; gradients above are scaled down. Absent: no clipping."""
    fused: bool | None = None
    """Update a layer by one kernel of torch's, which reads and writes each of its buffers once. It rounds otherwise than the
    row of operations that is used without. Default: where the moments are on a GPU."""

    def __post_init__(self) -> None:
        _fraction("optimizer", beta1=self.beta1, beta2=self.beta2)
        _positive("optimizer", epsilon=self.epsilon, clip_norm=self.clip_norm)
        _require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "must be at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRateConfig:
    """Learning rate by step: linear warm-up, then `schedule`."""

    peak: float = 3e-4
    """Highest learning rate."""
    final: float = 0.0
    """Learning rate of the last step (unused by `constant`)."""
    warmup: int = 0
    """Steps of linear warm-up; the first step has peak / warmup."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """After warm-up: half a cosine, a line, warm-up-stable-decay, or constant."""
    decay: int | None = None
    """Steps of the linear decay that ends `wsd`. Default: a fifth of the run."""

    def __post_init__(self) -> None:
        _positive("learning_rate", peak=self.peak, decay=self.decay)
        _require(self.warmup >= 0, "learning_rate.warmup", self.warmup, "must be at least 0")
        _require(0 <= self.final <= self.peak, "learning_rate.final", self.final,
                 f"must be between 0 and learning_rate.peak ({self.peak})")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Saving and resuming."""

    interval: int | None = None
    """Steps between checkpoints; one more follows the last step and a stop. Absent: only those."""
    keep: int | None = 2
    """Newest checkpoints to keep. Absent: all."""
    keep_every: int | None = None
    """Keep those of every so many steps, too. A multiple of `interval`."""
    keep_best: int | None = None
    """Keep so many of lowest validation loss, too. Only checkpoints of steps that were evaluated have one."""
    when_busy: Literal["wait", "skip"] = "wait"
    """What to do when a save is due while the one before is still being written behind the training: `wait` for it, or
    `skip` the new one. A save that fails is tried again and never waited for, but for the last one of a run."""
    resume: bool = True
    """Continue from the newest checkpoint of the run directory. With false, an existing checkpoint is an error."""

    def __post_init__(self) -> None:
        _positive("checkpoint", interval=self.interval, keep=self.keep, keep_every=self.keep_every,
                  keep_best=self.keep_best)
        if self.keep_every is not None:
            _require(self.interval is not None and self.keep_every % self.interval == 0, "checkpoint.keep_every",
                     self.keep_every, f"must be a multiple of checkpoint.interval ({self.interval})")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementConfig:
    """Where ranks run."""

    device: Literal["auto", "cpu", "gpu"] = "auto"
    """`gpu`: one GPU a rank, NCCL. `cpu`: gloo. `auto`: GPUs if the cluster has any."""
    cpus_per_rank: float = 1.0
    """CPUs asked of the cluster for a rank; fractions let several ranks share one."""
    threads_per_rank: int = 1
    """Compute threads of a rank. Equal on all ranks, since kernels and so bits depend on it."""
    memory_per_rank_gib: float | None = None
    """Memory that a rank may use by the plan's estimate, in GiB: pipeline.schedule `auto` chooses within it, another
    schedule that needs more is refused. Absent: no limit."""
    wait_s: float = 600.0
    """Longest wait for the cluster to offer the gangs' resources, in seconds. An autoscaler that can never offer them ends
    it sooner."""
    label: dict[str, str] = field(default_factory=dict)
    """Labels that nodes of ranks must have, such as `{market: spot}`. A value may be a choice, `in(a,b)`, or be ruled out,
    `!a` or `!in(a,b)`. An autoscaler adds nodes of a type with these labels."""
    domain: str | None = None
    """Name of a node label, such as `rack` or `ray.io/gpu-domain`: all ranks of a replica are on nodes with one value of it,
    so that pipeline stages are a short way apart. Absent: packed onto as few nodes as possible, wherever those are."""
    domains: tuple[str, ...] = ()
    """Values of that label over which replicas are spread in turn, so that one failure takes few of them. Empty: any."""

    def __post_init__(self) -> None:
        _require(bool(self.domain) or not self.domains, "placement.domains", list(self.domains),
                 "needs placement.domain, the label whose values these are")
        _require(self.domain is None or not self.domains or self.domain not in self.label, "placement.label", self.label,
                 f"has {self.domain}, which placement.domains already decides: leave one out")
        for key, value in self.label.items():
            _require(bool(key and value), "placement.label", self.label, "needs a name and a value for each label")
        _positive("placement", cpus_per_rank=self.cpus_per_rank, threads_per_rank=self.threads_per_rank,
                  memory_per_rank_gib=self.memory_per_rank_gib)
        _require(self.wait_s >= 0, "placement.wait_s", self.wait_s, "must be at least 0")
        _require(self.cpus_per_rank <= 1 or self.cpus_per_rank == int(self.cpus_per_rank), "placement.cpus_per_rank",
                 self.cpus_per_rank, "above 1 must be whole (Ray gives fractions only below 1)")


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkConfig:
    """Links between ranks."""

    interface: str | None = None
    """Network interface of gloo and NCCL. Default: the one that has the node's Ray address."""
    transport: Literal["auto", "gloo"] = "auto"
    """What ranks on GPUs communicate by. `auto`: NCCL. `gloo`: through host memory, which is slow and for trying things out
    where NCCL does not work. Ranks on CPUs use gloo."""
    store_port: int = 0
    """Port of the rendezvous store on the driver's node; 0 takes a free one."""
    timeout_s: float = 600.0
    """Last-resort limit of one communication, in seconds."""
    environment: dict[str, str] = field(default_factory=dict)
    """Extra environment variables of every rank (NCCL tuning, for instance)."""

    def __post_init__(self) -> None:
        _positive("network", timeout_s=self.timeout_s)
        _require(0 <= self.store_port < 65536, "network.store_port", self.store_port, "must be between 0 and 65535")


@dataclass(frozen=True, kw_only=True, slots=True)
class RebalanceConfig:
    """Moving layers between stages, and micro-batches between replicas, while the job runs."""

    mode: Literal["on", "advise", "off"] = "on"
    """`on` moves when that pays, `advise` only says what it would do. Moving layers never changes a result; other shares
    of the replicas change the order of sums (see train.deterministic)."""
    interval: int = 20
    """Steps between decisions."""
    gain: float = 0.05
    """Least predicted gain in speed worth a move: 0.05 is 5 %."""
    horizon: int = 1000
    """Steps within which a move must repay its cost."""

    def __post_init__(self) -> None:
        _positive("rebalance", interval=self.interval, gain=self.gain, horizon=self.horizon)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig:
    """Going on after ranks were lost. Several that are lost at once count as one failure."""

    deaths: int = 10
    """Failures by ranks whose process ended that a run survives within `window_s`; one more ends it. 0: the first one ends
    it."""
    preemptions: int = 100
    """The same for deaths on a node that was said to go away."""
    errors: int = 1
    """The same for ranks that raised an error of their own, which may come again. An error that tells what to change (data,
    checkpoint, configuration) always ends the run."""
    snapshot_interval: int | None = None
    """Steps between snapshots: every rank keeps two copies of its state in host memory, and two of another rank's, if it can
    be on another node. So a state that no other replica holds (one replica, sharded optimizer state) survives the death of
    its rank, with about so many steps done again. Absent: such a death goes back to the newest checkpoint."""
    hang_limit_s: float = 120.0
    """Time in which no rank goes on with its step, in seconds, after which the one that holds the others up is ended and
    replaced as if it had died. Longer where steps are slow, at least four times the slowest one, and three times as long
    until the first step of new processes is done."""
    spares: int = 0
    """Processes that wait, with torch loaded, to take the place of lost ranks, which saves most of the time that a recovery
    takes. On a Ray cluster so many on every node of the job; they ask for no CPUs or GPUs, and take over those of the lost
    rank."""
    notices: Literal["none", "aws", "gcp", "azure"] = "none"
    """Cloud whose notices of machines that go away are read, on every node of a Ray cluster. Such a node is drained in Ray;
    then, as after `ray drain-node`, the job goes on without its gang where mesh.data allows, else it saves a checkpoint."""
    metadata_address: str = "http://169.254.169.254"
    """Where a machine finds its metadata service."""
    replace_s: float = 20.0
    """Where mesh.data is a range: time in which the new process of a lost rank must have started, in seconds. After it, or
    as soon as the cluster has no room, the job goes on without the rank's gang."""
    window_s: float = 3600.0
    """Failures longer ago are forgotten, in seconds."""
    backoff_s: float = 1.0
    """Wait before the second try when no step was done since the first, in seconds; each later wait is twice as long."""

    def __post_init__(self) -> None:
        _require(self.deaths >= 0, "recovery.deaths", self.deaths, "must be at least 0")
        _require(self.preemptions >= 0, "recovery.preemptions", self.preemptions, "must be at least 0")
        _require(self.spares >= 0, "recovery.spares", self.spares, "must be at least 0")
        _require(self.errors >= 0, "recovery.errors", self.errors, "must be at least 0")
        _positive("recovery", window_s=self.window_s, replace_s=self.replace_s, hang_limit_s=self.hang_limit_s,
                  snapshot_interval=self.snapshot_interval)
        _require(self.backoff_s >= 0, "recovery.backoff_s", self.backoff_s, "must be at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class StabilityConfig:
    """Numbers that go bad. A step whose loss or gradient is not finite changes nothing; it is computed once more to name the
    layer and the rank where that began."""

    skipped: int = 10
    """Steps without finite numbers among the last `window` that a run survives; one more ends it. While the last step was
    such a one nothing is saved, so that the newest checkpoint is a good one."""
    window: int = 100
    """Steps that are looked back at."""
    spike: float | None = None
    """A loss spike is a loss so many standard deviations (estimated from the median deviation) above the median of the last
    `window` steps, once there are half as many. Absent: none is looked for."""
    on_spike: Literal["tell", "rewind"] = "tell"
    """`rewind` goes back to the newest checkpoint from before the spike and leaves the data of the offending steps out: they
    change nothing, and checkpoints list them."""
    leave_out_before: int = 0
    """Steps before the spike that are left out, too, as far as they come after that checkpoint."""
    rewinds: int = 3
    """Spikes that a run goes back for; later ones are only told."""

    def __post_init__(self) -> None:
        _positive("stability", window=self.window, spike=self.spike)
        for name in ("skipped", "leave_out_before", "rewinds"):
            _require(getattr(self, name) >= 0, f"stability.{name}", getattr(self, name), "must be at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig:
    """Metrics for Prometheus, from the driver's process and through Ray's own metrics."""

    port: int | None = 9600
    """Port of the driver's endpoint, or the next free one if it is taken; 0 takes any free one. Absent: no endpoint."""
    address: str = "127.0.0.1"
    """Address that it listens on, and on no other: the default is for a Prometheus on the driver's machine, `0.0.0.0` for
    one anywhere. What can reach it can read it."""
    targets: str | None = None
    """Directory of `NAME.targets.json`, the service-discovery file that tells a Prometheus of the endpoint while the run
    lasts. Absent: run.directory, or none where that is a URI."""
    ray: bool = True
    """Copy all metrics to Ray's own with `--launcher ray`, so that whoever scrapes the cluster has them."""
    tensorboard: bool = False
    """Write the run's figures for TensorBoard, too (`tensorboard/` beside the run's records)."""
    peak_tflops: float | None = None
    """Peak of a rank's device in TFLOP/s (989 for an H100 in bf16): what model FLOPs utilization is a share of. Absent: by
    the data sheet of A100, H100, H200, B200 and L40S; not known of other GPUs; of a CPU what a matrix product in train.dtype
    reaches when the rank starts."""

    def __post_init__(self) -> None:
        _require(self.port is None or 0 <= self.port < 65536, "metrics.port", self.port, "must be between 0 and 65535")
        _require(bool(self.address), "metrics.address", self.address, "must be an address of the driver's node")
        _positive("metrics", peak_tflops=self.peak_tflops)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowdownConfig:
    """Make one rank, or one layer wherever it lives, slower than it is."""

    factor: float
    """How many times as long its compute takes; at least 1."""
    rank: int | None = None
    """Rank to slow down. Give this or `layer`."""
    layer: int | None = None
    """Layer to slow down, 0 the embedding. Give this or `rank`."""
    first: int = 1
    """First step that is slow."""
    last: int | None = None
    """Last step that is slow. Absent: to the end."""

    def __post_init__(self) -> None:
        _require(self.factor >= 1, "debug.slowdown.factor", self.factor, "must be at least 1")
        _require((self.rank is None) != (self.layer is None), "debug.slowdown", {"rank": self.rank, "layer": self.layer},
                 "give either rank or layer")

    @property
    def subject(self) -> str:
        """`rank 3`, `layer 0`."""
        return f"rank {self.rank}" if self.rank is not None else f"layer {self.layer}"

    def is_on(self, step: int) -> bool:
        return self.first <= step and (self.last is None or step <= self.last)


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultConfig:
    """Make one rank fail."""

    rank: int
    """Rank that fails."""
    step: int
    """Step in which it does."""
    kind: Literal["kill", "hang", "raise"] = "kill"
    """Its process is killed, it stands still, or it raises an error."""

    def __post_init__(self) -> None:
        _require(self.rank >= 0, "debug.faults.rank", self.rank, "must be at least 0")
        _positive("debug.faults", step=self.step)


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugConfig:
    """For tests and demonstrations; nothing here belongs into a real run."""

    slowdown: tuple[SlowdownConfig, ...] = ()
    """Ranks or layers to slow down on purpose."""
    faults: tuple[FaultConfig, ...] = ()
    """Ranks that fail on purpose, in this order: each fault happens after the recovery from the one before, once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """A whole training job."""

    run: RunConfig
    """Name and place of the run."""
    model: ModelConfig
    """The transformer."""
    mesh: MeshConfig = MeshConfig()
    """Ranks along each axis."""
    pipeline: PipelineConfig = PipelineConfig()
    """Stages and schedule."""
    train: TrainConfig
    """Length, batch and numerics."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and clipping."""
    learning_rate: LearningRateConfig = LearningRateConfig()
    """Learning rate by step."""
    data: DataConfig
    """Token data."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Validation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    placement: PlacementConfig = PlacementConfig()
    """Devices and CPUs."""
    network: NetworkConfig = NetworkConfig()
    """Links between ranks."""
    rebalance: RebalanceConfig = RebalanceConfig()
    """Moving layers while the job runs."""
    recovery: RecoveryConfig = RecoveryConfig()
    """Going on after ranks were lost."""
    stability: StabilityConfig = StabilityConfig()
    """Numbers that go bad."""
    metrics: MetricsConfig = MetricsConfig()
    """Metrics for Prometheus."""
    debug: DebugConfig = DebugConfig()
    """Slowdowns on purpose."""

    def __post_init__(self) -> None:
        model, tensor = self.model, self.mesh.tensor
        num_layers = model.blocks + 2
        _require(model.heads % tensor == 0, "mesh.tensor", tensor, f"must divide model.heads ({model.heads})")
        _require(model.num_kv_heads % tensor == 0 or tensor % model.num_kv_heads == 0, "mesh.tensor", tensor,
                 f"must divide model.kv_heads ({model.num_kv_heads}) or be a multiple of it")
        _require(model.feed_forward % tensor == 0, "mesh.tensor", tensor,
                 f"must divide model.feed_forward ({model.feed_forward})")
        if self.train.sequence_parallel:
            _require(self.train.sequence % tensor == 0, "train.sequence", self.train.sequence,
                     f"must be a multiple of mesh.tensor ({tensor}) with train.sequence_parallel")
        self._check_stages(num_layers)
        shard_group = self.train.shard_group
        _require(shard_group is None or self.mesh.replicas % shard_group == 0, "train.shard_group", shard_group,
                 f"must divide mesh.data ({self.mesh.replicas})")
        _require(self.train.sharding == "none" or not self.mesh.is_elastic, "train.sharding", self.train.sharding,
                 "must be 'none' where mesh.data is a range: every replica then holds all that a lost one did")
        if model.family == "gpt2" and model.positions is not None:
            _require(self.train.sequence <= model.positions, "train.sequence", self.train.sequence,
                     f"is beyond model.positions ({model.positions})")
        dropout = model.dropout or model.attention_dropout
        _require(self.train.compile == "none" or not dropout, "train.compile", self.train.compile,
                 "needs model.dropout and model.attention_dropout of 0: masks that are the same under any layout are drawn "
                 "by what cannot be compiled")
        self._check_keep_best()
        ranks = self.mesh.replicas * self.mesh.pipeline * tensor
        _require(ranks > 1 or self.recovery.snapshot_interval is None, "recovery.snapshot_interval",
                 self.recovery.snapshot_interval, "needs a second rank that keeps the copies, the mesh has one")
        hang, timeout = self.recovery.hang_limit_s, self.network.timeout_s
        _require(hang < timeout, "recovery.hang_limit_s", hang, f"must be below network.timeout_s ({timeout:g})")
        warmup = self.learning_rate.warmup
        _require(warmup <= self.train.steps, "learning_rate.warmup", warmup,
                 f"is more than train.steps ({self.train.steps})")

    @property
    def evaluation_sets(self) -> tuple[EvaluationSetConfig, ...]:
        """`evaluate.sets`, or the validation splits of all that is trained on."""
        if self.evaluate.sets:
            return self.evaluate.sets
        return tuple(EvaluationSetConfig(name="validation" if self.data.path else source.name, path=source.path)
                     for source in self.data.all_sources)

    @property
    def residual_sequence(self) -> int:
        """Positions of a sample that one rank has of the residual stream."""
        return self.train.sequence // (self.mesh.tensor if self.train.sequence_parallel else 1)

    @property
    def shard_group(self) -> int:
        """Replicas that share one copy of what is sharded over the data axis; not known under `auto`."""
        return 1 if self.train.sharding == "none" else self.train.shard_group or self.mesh.replicas

    @property
    def joint_ops(self) -> bool:
        """Ranks of several replicas gather or reduce within ops, so that their programs must have the same ones."""
        return self.train.sharding in ("gradients", "full") and self.shard_group > 1

    @property
    def reduce_dtype(self) -> str:
        """Type in which replicas sum gradients."""
        return "fp64" if (self.train.dtype, self.train.reduce_dtype) == ("fp64", "fp32") else self.train.reduce_dtype

    def _check_keep_best(self) -> None:
        saves, evaluates = self.checkpoint.interval, self.evaluate.interval
        if self.checkpoint.keep_best is not None and saves is not None:
            _require(evaluates is not None and saves % evaluates == 0, "checkpoint.keep_best", self.checkpoint.keep_best,
                     f"needs a validation loss of every checkpoint: checkpoint.interval ({saves}) must be a multiple of "
                     f"evaluate.interval ({evaluates})")

    def _check_number(self, key: Literal["layers", "recompute"], of: str) -> None:
        """That there is one for each stage."""
        values: tuple[object, ...] | None = getattr(self.pipeline, key)
        if values is None:
            return
        ranks, chunks = self.mesh.pipeline, self.pipeline.num_chunks
        # Without a number of chunks, `auto` takes as many as are given for.
        free = self.pipeline.schedule == "auto" and self.pipeline.chunks is None
        fits = len(values) % ranks == 0 if free else len(values) == ranks * chunks
        needed = f"a multiple of {ranks} stages" if free else f"{ranks * chunks} stages (pipeline.chunks is {chunks})"
        _require(fits and len(values) > 0, f"pipeline.{key}", list(values),
                 f"needs one {of} per stage, mesh.pipeline is {ranks}: {needed}")

    def _check_stages(self, num_layers: int) -> None:
        ranks, chunks, counts = self.mesh.pipeline, self.pipeline.num_chunks, self.pipeline.layers
        whole = f"{num_layers} layers (embedding, {self.model.blocks} blocks, head)"
        _require(ranks <= num_layers, "mesh.pipeline", ranks,
                 f"the model has {whole} and a stage keeps at least one: at most {num_layers}")
        _require(ranks * chunks <= num_layers, "pipeline.chunks", chunks,
                 f"with pipeline.schedule {self.pipeline.schedule} and mesh.pipeline {ranks} that is {ranks * chunks} "
                 f"stages, the model has {whole} and a stage keeps at least one: at most {num_layers // ranks} chunks, "
                 f"or mesh.pipeline at most {num_layers // chunks}")
        self._check_number("layers", "count")
        self._check_number("recompute", "kind")
        if counts is None:
            return
        recompute = self.pipeline.recompute
        _require(recompute is None or len(recompute) == len(counts), "pipeline.recompute", recompute,
                 f"needs one kind per stage, pipeline.layers has {len(counts)} stages")
        _require(sum(counts) == num_layers, "pipeline.layers", list(counts),
                 f"adds up to {sum(counts)}, the model has {whole}")
