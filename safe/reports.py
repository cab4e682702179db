"""What a run says of itself: layout, memory, traffic, traces for Perfetto, profiles."""

import contextlib
import gc
import json
import os
import pathlib
import time
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import collectives as dist
from further.bpe import Tokenizer
from further.flags import learning_rate
from further.letters import tensors_in
from further.text import Bytes
from safe.data import about_left_out, Numbers
from safe.messages import Watched
from theory import speed
from theory.memory import kept_tensors, memory_bytes


@contextlib.contextmanager
def watching(owner, around):
    """Inside, whatever owner.around holds is inside of around(it), too. owner: a Pipeline, or the class Watched."""
    before = owner.around

    @contextlib.contextmanager
    def both(what):
        with before(what), around(what):
            yield

    owner.around = staticmethod(both)
    try:
        yield
    finally:
        owner.around = staticmethod(before)


@contextlib.contextmanager
def timed(pipeline):
    """Time each action of the pipeline inside, from the moment its input is there: waiting for it does not count.

    Yields a list that in the end holds (action, start, end), seconds of the wall clock. On CUDA a time is an event in
    the stream, so the CPU need not wait for the GPU.
    """
    cuda = pipeline.device.type == "cuda"
    spans = []

    def now():
        if not cuda:
            return time.time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def around(action):
        if action:
            spans.append([action, now(), None])
        yield
        if action:
            spans[-1][2] = now()
        elif spans[-1][2] is None:  # else the list has ended, and averages are still on their way
            spans[-1][1] = now()  # until the end of a wait the rank was idle

    if cuda:
        torch.cuda.synchronize()
    origin = time.time()
    zero = now()
    with watching(pipeline, around):
        yield spans
    if cuda:
        torch.cuda.synchronize()
        spans[:] = [(a, *(origin + zero.elapsed_time(e) / 1e3 for e in events)) for a, *events in spans]


def storages(tensors):
    """{storage: its bytes} of these tensors; views share one."""
    return {StorageWeakRef(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}


class BirthLog(TorchDispatchMode):
    """Measures what activations take: counts the bytes of every tensor made inside it, except views of older ones."""

    def __init__(self):
        super().__init__()
        self.born = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        older = dict.fromkeys(storages(tensors_in((args, kwargs))), 0)
        for storage, size in {**storages(tensors_in(out)), **older}.items():
            self.born.setdefault(storage, size)
        return out

    def alive(self, others):
        """Bytes of the counted storages that still exist, without some others. One may have been emptied since."""
        total = 0
        for storage, size in self.born.items():
            now = None if storage in others else torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
            total += min(size, now.nbytes()) if now else 0
        return total


@dataclass
class Measured:
    """Of a step: how many bytes its activations take, and what share of the tokens this rank's experts got."""
    activations: int = 0
    share: float = 1.0


@contextlib.contextmanager
def measured(trainer):
    """Yields a Measured, of the activations of the step inside: what lives after a forward, without micro-batches, the
    gradients of earlier ones, messages between stages, and buffers of collectives."""
    found = Measured()
    births = BirthLog()
    net = trainer.net
    pipeline = net.pipeline

    @contextlib.contextmanager
    def note(action):
        yield
        if not action or action.kind != "F":
            return
        gc.collect()  # recomputation leaves reference cycles, which keep dropped activations
        # What is on its way. On a GPU the host does not wait until that has arrived.
        sent = [tensor for _, tensor in (*pipeline.sending, *pipeline.results.values())]
        others = storages([*pipeline.x, *pipeline.y, pipeline.dloss, *kept_tensors(net)["gradients"], *sent])
        found.activations = max(found.activations, births.alive(others))

    with births, watching(pipeline, note):
        yield found


def share_of(trainer, loads):
    """What share of the tokens this rank's experts got, of a step's loads (L, E): these are the whole batch's, so this
    assumes that every group that shares out the experts got equal loads."""
    ranks = trainer.s.ep
    if ranks == 1:
        return 1.0
    own = loads.chunk(ranks, 1)[dist.get_rank(trainer.net.groups.ep)]
    return (own.sum() / loads.sum() * ranks).item()


def describe(loop):
    """Print what the run is, and what it trains on if steps are left; else it only samples."""
    s, c, run, trainer = loop.s, loop.config, loop.run, loop.trainer
    mesh = trainer.net.mesh
    device = trainer.device.type
    axes = f"dp {s.dp}" + f" (ep {s.ep})" * (s.ep > 1) + f" x tp {s.tp}" + " with sp" * s.sp
    axes += f" x cp {s.cp} ({s.cp_kind})" * (s.cp > 1)
    axes += f" x pp {s.pp} ({s.schedule})" * (s.pp > 1)
    origin = run.checkpoint.path if run.checkpoint else s.init_from or s.model
    trains = loop.first < s.steps
    loop.say(
        f"mode     {run.edition.mode}\n"
        f"layout   {axes} = {mesh.size()} processes, {device} "
        f"({'NCCL' if device == 'cuda' else 'gloo'}), ZeRO stage {s.zero}"
        f"{f' within {s.zero_within}' if s.zero_within else ''}, collectives: {s.comm}\n"
        f"model    {origin}: {c.n_layer} layers, {c.n_head} heads, width {c.n_embd}, vocabulary {c.vocab_size}, "
        f"{parameters_in_words(c)}, {s.dtype}" + about_vocabulary(loop) * (not trains))
    if trains:
        describe_training(loop)
    elif s.out and s.steps:
        loop.say(f"steps    all {s.steps} are done: --resume --steps {2 * s.steps} trains on")


def describe_training(loop):
    s, c, run, trainer = loop.s, loop.config, loop.run, loop.trainer
    left_out = "; " * bool(run.left_out) + about_left_out(run.left_out)
    loop.say(
        f"data     {s.data or 'the Python standard library'}: {len(trainer.train_data):,} {loop.unit}s to train on, "
        f"{len(trainer.held_out):,} held out{left_out}{about_vocabulary(loop)}\n"
        f"batch    {s.batch_size} sequences of {c.seq_len} a step = {s.batch_size * c.seq_len:,} tokens: "
        f"dp {s.dp} x {s.micro_batches} micro-batches of {s.batch_size // s.dp // s.micro_batches}{about_context(c)}")
    kinds = [f"{kind} {size(n)}" for kind, n in predicted_bytes(trainer).items()]
    loop.say(f"memory   a rank, predicted: {', '.join(kinds)}")
    if s.steps <= s.warmup_steps:
        loop.say(f"lr       all {s.steps} steps are warm-up, which ends at {learning_rate(s, s.steps - 1):.2g} of "
                 f"--lr {s.lr:g}: a smaller --warmup-steps reaches it")
    if s.out:
        loop.say(f"page     {s.out}/index.html: its curves, while the run goes on")
    if s.out and (run.came.files or run.came.left_out):
        left_out = "; left out: " + ", ".join(f"{name} ({why})" for name, why in run.came.left_out.items())
        loop.say(f"export   {', '.join(run.came.files)}{left_out * bool(run.came.left_out)}")
    if speed.mfu_note(c) and speed.peak_flops(trainer.device):
        loop.say(f"speed    {speed.mfu_note(c)}")


def about_context(config):
    """How many positions a model knows, in words, where sequences are shorter."""
    known = getattr(config, "max_positions", 0)
    return f"; the model knows {known:,} positions, --seq-len takes more of them" * (known > config.seq_len)


def parameters_in_words(config):
    said = f"{config.parameters():,} parameters"
    if not config.experts:
        return said
    shared = f" and {config.shared_experts} shared" * bool(config.shared_experts)
    return f"{said} ({config.active_parameters():,} a token: {config.top_k} of {config.experts} experts{shared})"


def about_vocabulary(loop):
    """A line about what the tokens are, where that is not said by the vocabulary's size."""
    vocabulary = loop.trainer.vocabulary
    model = loop.config.vocab_size
    if isinstance(vocabulary, Tokenizer):
        mean = f", {loop.bytes_a_token:.2f} bytes a token" if loop.bytes_a_token else ""
        unused = f" of the model's {model:,} numbers" * (model > len(vocabulary))
        return f"\ntokens   of {vocabulary.folder}: {len(vocabulary):,}{unused}{mean}"
    if isinstance(vocabulary, Numbers):
        width = getattr(loop.trainer.train_data, "dtype", "")  # nothing is read where nothing is trained
        return f"\ntokens   are numbers{f' of {width}' * bool(width)}; --tokenizer FOLDER shows text"
    if isinstance(vocabulary, Bytes) and model > len(vocabulary):
        return f"\ntokens   are bytes, {len(vocabulary)} of the vocabulary's {model:,} numbers; see --tokenizer"
    return ""


def predicted_bytes(trainer, share=1.0):
    """`theory.memory.memory_bytes` of this rank, whose experts got this share of the tokens."""
    return memory_bytes(trainer.config, trainer.s, trainer.net.mesh.get_coordinate()[0], share)


def measured_bytes(trainer, seen):
    """What `predicted_bytes` predicts: {kind: bytes} of this rank's tensors, each storage counted once. seen: the
    Measured of its first step."""
    sizes = {}
    counted = set()
    for kind, tensors in kept_tensors(trainer.net).items():
        found = storages(tensors)
        sizes[kind] = sum(found[storage] for storage in found.keys() - counted)
        counted |= found.keys()
    return dict(sizes, activations=seen.activations)


@contextlib.contextmanager
def traced(loop):
    """Write what every rank runs in the step inside into one file, for Perfetto (ui.perfetto.dev) or
    chrome://tracing."""
    with timed(loop.trainer.net.pipeline) as spans:
        yield
    every = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    torch.distributed.gather_object(spans, every)
    if every:
        events = [{"name": f"{kind} stage {stage} micro-batch {i}", "ph": "X", "pid": 0, "tid": rank,
                   "ts": 1e6 * begin, "dur": 1e6 * (end - begin), "args": {"stage": stage, "micro_batch": i}}
                  for rank, spans in enumerate(every) for (kind, stage, i), begin, end in spans]
        with nothing_else_lost("trace", loop.s.profile, loop.say):
            pathlib.Path(loop.s.profile, "trace.json").write_text(json.dumps({"traceEvents": events}))


@contextlib.contextmanager
def nothing_else_lost(what, folder, say):
    """A full disk costs the file that is written inside, not the run."""
    try:
        yield
    except OSError as problem:
        say(f"no {what} in {folder}: {problem.strerror}")


def action_range(action):
    """Of a profile, "F3 stage 0"; a wait has none."""
    return torch.profiler.record_function(f"{action} stage {action.stage}") if action else contextlib.nullcontext()


def operation_range(operation):
    """Of a profile, e.g. "all_reduce 4,096 bytes": the size of the largest tensor."""
    name, arguments = operation
    most = max((t.nbytes for t in dist.tensors_among(arguments)), default=0)
    return torch.profiler.record_function(f"{name} {most:,} bytes")


@contextlib.contextmanager
def profiled(loop):
    """Profile the step that runs inside, into a file on each rank. Ranges name the pipeline's actions, and collectives,
    on whatever thread they run."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler prints lines of its own on every rank
    with contextlib.ExitStack() as stack, torch.profiler.profile(  # of the CPU, and of CUDA where it is available
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)) as profile:
        stack.enter_context(watching(loop.trainer.net.pipeline, action_range))
        stack.enter_context(watching(Watched, operation_range))
        profile.add_metadata("ringGPT", "train.py --profile")  # by which the file is known as ours
        yield
    path = pathlib.Path(loop.s.profile, f"rank-{dist.get_rank()}.json")
    with nothing_else_lost("profile", loop.s.profile, loop.say):
        path.write_text("")  # raises an error where the profiler would fail silently
        profile.export_chrome_trace(str(path))
        loop.say(f"profile  {path.parent}: trace.json, rank-0.json and so on, for ui.perfetto.dev")


def describe_first_steps(loop):
    """Print the measured memory beside the predicted, and the bytes that one step sends. Returns both memories for the
    log."""
    predicted = predicted_bytes(loop.trainer, loop.seen.share)
    measured = measured_bytes(loop.trainer, loop.seen)
    kinds = ", ".join(f"{kind} {size(n)} ({size(predicted[kind])})" for kind, n in measured.items())
    if loop.trainer.device.type == "cuda":
        kinds += (f"; the allocator holds {size(torch.cuda.memory_allocated())}, at most "
                  f"{size(torch.cuda.max_memory_allocated())}")
    sent = ", ".join(f"{name} {t.calls} calls {size(t.bytes)}" for name, t in dist.traffic().items() if t.bytes)
    sent = "not counted with --comm torch" if loop.s.comm == "torch" else sent or "nothing"
    loop.say(f"memory   measured (predicted): {kinds}\ntraffic  sent by rank 0 a step: {sent}")
    return {"predicted_bytes": predicted, "measured_bytes": measured}


def size(n):
    return next(f"{n / 2**k:.1f} {unit}" for k, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if n >= 2**k or k == 10)
