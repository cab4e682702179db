"""A step's letters, on one rank after the other, and the first thing that is wrong: further/letters.py at work."""

import math
import sys
from functools import partial
from types import SimpleNamespace

import torch
from torch.distributed import get_process_group_ranks, ProcessGroup

import collectives as dist
import train
from further.experts import balance, loads
from further.letters import Letters, Wrong
from parallel import params_together, placement_of, Unit
from further.bad_input import reject


def grid_of(layout):
    """{axis: (its ranks, step)}, as for `Letters`, so fine that each group of the layout lies along some of them."""
    replicas = layout.dp * layout.cp
    within = layout.zero_within or replicas
    ends = dict(tp=1, cp=layout.cp, ep=layout.cp * layout.ep, dp=replicas, zero=within, pp=replicas * layout.pp)
    grid, step = {}, 1
    for axis, end in sorted(ends.items(), key=lambda item: item[1]):
        end *= layout.tp
        reject(end % step, f"--zero-within {within} cuts through the ranks of --cp or --ep: leave it out")
        if end > step:
            grid[axis] = end // step, step
        step = end
    return grid


class UnitsOfOne(torch.optim.SGD):
    """Whose parameters travel one by one, so that a message has one letter."""

    @staticmethod
    def make_units(pieces, group, zero, dtype):
        return [(piece, Unit([param], ranks, zero, dtype))
                for (piece, ranks, *_), params in params_together(pieces, group).items() for param in params]


class Step(Letters):
    """A step of a GPT in a layout, on one rank of a group that sends nothing. Raises the first Wrong."""

    def __init__(self, config, layout, rank, x, y):
        super().__init__(grid_of(layout))
        self.means = {*self.grid} - {"tp", "pp"}  # the loss is the mean over these
        self.units = []
        self.between = {}  # axis -> letters of what ranks send each other along it
        self.places, self.node = {}, ""  # number of a node of autograd -> where forward made it; where backward is
        optimizer = partial(UnitsOfOne, lr=0.1)
        links = {"ours": lambda group: SimpleNamespace(run=partial(self.collective, group))}
        kept, dist.process = dist.process, dist.Process(links)
        torch.distributed.init_process_group("fake", rank=rank, world_size=math.prod(n for n, _ in self.grid.values()))
        try:
            self.run(train.parallelize(config, layout, "cpu", optimizer=optimizer), [*x], [*y])
        finally:
            torch.distributed.destroy_process_group()
            dist.process = kept

    def run(self, net, x, y):
        self.names = {id(part): name for piece in net.pieces.values() for name, part in piece.named_modules()}
        self.units = net.units
        inputs = dict.fromkeys(self.means | {"pp"}, "V")
        self.between["pp"] = inputs | {"tp": "V" if net.layout.sp else "R"}
        for unit in self.units:
            self.written(unit)
        for p, name in net.named_parameters().items():
            p.register_hook(partial(self.arrived, name, self.wanted(p)))
        for tokens in x + y:
            self.set(tokens, inputs)
        net.pipeline.loss = partial(self.loss, net.pipeline.loss)
        with self:
            loss = net.forward_backward(x, y)
            self.must_be("the loss", loss, dict.fromkeys(self.means - self.axes_of(net.groups.cp), "M"))
            for p, name in net.named_parameters().items():
                for held in p, net.unit_of[p].stepped[p]:
                    if held.grad is not None and held.numel():
                        self.must_be(f"at the optimizer the gradient of {name}", held.grad, self.wanted(held))
            for unit in self.units:
                self.written(unit)
            net.step()
            sent = self.sent.copy()
            self.check_weights(net)
            self.sent = sent
            if net.config.experts:
                balance(net, loads(net), 0.02)
            for router in net.routers.values():
                self.must_be("a router's bias", router.bias, {})

    def written(self, unit):
        """The optimizer has written this rank's row alone."""
        if unit.zero:
            self.set(unit.weights, dict.fromkeys(self.grid, "E\n    since the optimizer's step"))
            self.set(unit.mine, dict.fromkeys(self.axes_of(unit.group), "V"))  # padding, too
        for stepped in unit.stepped.values():
            if stepped.numel():
                self.set(stepped, self.wanted(stepped))

    def collective(self, group, name, async_op, algorithm, output, *others):
        """Over the axes along which nothing travels, gathered weights have their parameters' letters."""
        handle = super().collective(group, name, async_op, algorithm, output, *others)
        for unit in self.units:
            if output is unit.weights:
                letters = {axis: self.of(output)[axis] for axis in self.axes_of(group)}
                for param, view in zip(unit.params, unit.views):
                    self.set(view, self.wanted(param) | letters)
        return handle

    def check_weights(self, net):
        """After a step: they are there, or the next G brings them."""
        names = net.named_parameters()
        for unit in self.units:
            if unit.zero and not unit.users:
                unit.gather()
            for param, view in zip(unit.params, unit.views):
                self.must_be(f"after a step {names[param]}", view, self.wanted(param))

    def wanted(self, param):
        """The letters of a parameter, and of its gradient at the optimizer, by its placement."""
        place = placement_of(param)
        return dict.fromkeys(self.axes_of(*place.sharded_over) - self.axes_of(*place.partial_over), "V")

    def loss(self, real, output, target):
        value = real(output, target)
        self.set(value, self.of(value) | dict.fromkeys(self.means, "M"))
        return value

    def arrived(self, name, cut, grad):
        """In backward: ranks that have the same parameter have terms of its gradient."""
        letters = self.of(grad)
        for axis, letter in letters.items():
            if axis not in cut and letter[0] in "VP":
                letters[axis] = f"{'M' if axis in self.means else 'P'}\n    since {self.place()}"
                self.sent[axis, f"gradient: {letter[0]} -> {letters[axis][0]}", name] += 1
            elif letter == "R" and axis in cut:  # by a rank's number
                letters[axis] = "V"
        self.set(grad, letters)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        newest, node = torch.autograd._get_sequence_nr() - 1, torch._C._current_autograd_node()
        if newest not in self.places:
            self.places[newest] = self.place()
        self.node = self.places.get(node and node._sequence_nr(), self.node)  # one that adds to .grad is not there
        if func.namespace == "c10d":
            self.message(func.overloadpacket.__name__, *args)
            return func(*args, **kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def message(self, name, tensors, group, peer, tag):
        """isend and irecv."""
        group = ProcessGroup.unbox(group)
        (axis,), ends = self.axes_of(group), (dist.get_rank(), get_process_group_ranks(group)[peer])
        self.calls[ends if name == "send" else ends[::-1], "a message"] += 1
        for t in tensors:
            if name == "send":
                self.must_be("what is sent", t, self.between.setdefault(axis, self.of(t)))
            else:
                self.set(t.fill_(1), self.between[axis])

    def place(self):
        """Whose forward runs, and which line; in backward, also where forward made what backward goes through."""
        name = line = before = ""
        frame = sys._getframe(1)
        while frame and not before and not (name and line):
            code, room = frame.f_code, frame.f_globals["__name__"]
            if room.split(".")[0] in ("model", "parallel", "train", "further") and room != Letters.__module__:
                function = getattr(code, "co_qualname", code.co_name)
                line = line or f"{room.replace('.', '/')}.py:{frame.f_lineno} {function}"
            if code.co_name == "_engine_run_backward":
                before = f", backward of {self.node}"
            name = name or self.names.get(id(frame.f_locals.get("self")), "")
            frame = frame.f_back
        return f"{name} {line}{before}".strip(" ,") or "the end of the step"


def check(config, layout, ranks, x, y):
    """({rank: its Step}, what is wrong first). x, y: a rank's micro-batches."""
    steps = {}
    try:
        for rank in ranks:
            steps[rank] = Step(config, layout, rank, x, y)
    except Wrong as problem:
        return steps, f"rank {rank}   {problem}"
    for group, what in set().union(*(step.calls for step in steps.values())):
        times = [steps[rank].calls[group, what] for rank in group if rank in steps]
        if min(times) < max(times):
            return steps, f"{what} of ranks {group}: they call it {times} times"
    return steps, ""
