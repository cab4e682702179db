"""Units whose gradients are written where they travel.

Takes the place of parallel.py's Unit. A product of weight gradients writes into the message itself, in the message's
dtype: 4 bytes a parameter, where a gradient in 16 bits, its cast, its sum and its copy move 20.
"""

import torch

from fast.fp8 import TwoCopies
from further.muon import UnitOfMatrices
from parallel import is_matrix, Unit


class WrittenUnit(Unit):
    """A Unit that has its message from the first gradient on.

    message    (N, K/N), or None: nothing has been written
    room       (memory for it that is kept from step to step, each parameter's place there), or None
    written    the parameters whose gradient the message has; the others' numbers in it mean nothing
    cast_by    what writes this rank's row in the layers' dtype while it steps, an AdamW, or None
    """
    cast_by = None

    def __init__(self, params, *options):
        super().__init__(sorted(params, key=is_matrix), *options)  # so that few kernels step them
        self.room = None
        self.message = None
        self.written = set()
        for param in self.params:
            param.grad_dtype = param.dtype  # `collect` casts it

    def cast(self):
        if not self.cast_by or self.zero == 3:  # a row that comes and goes is not there while the optimizer steps
            super().cast()

    def copies(self):
        """{what an optimizer steps: where its 16-bit numbers go}"""
        if not self.has_master or self.zero == 3:
            return {}
        return {stepped: self.part_of(self.row, param) for param, stepped in self.stepped.items()}

    def place(self, param):
        """Where in the message a parameter's gradient goes."""
        if self.message is None:
            is_free = self.room is not None and self.total is None and not self.sending
            if is_free:
                self.message, self.places = self.room
            else:
                self.message = self.mine.new_empty(self.weights.shape)
                self.places = dict(zip(self.params, self.views_of(self.message)))
        return self.places[param]

    def add(self, param, a, b=None):
        """Add a gradient a, or a product a b, to param's."""
        place = self.place(param)
        beta = int(param in self.written)
        self.written.add(param)
        if b is None:
            (place.add_ if beta else place.copy_)(a)
        elif isinstance(a, TwoCopies):
            a.add_product(b, place, beta)
        elif place.dtype == a.dtype:
            place.addmm_(a, b, beta=beta)
        elif place.device.type == "cpu":  # which has no such product
            (place.add_ if beta else place.copy_)(a.to(place.dtype) @ b.to(place.dtype))
        else:
            torch.ops.aten.addmm.dtype_out(place, a, b, place.dtype, beta=beta, out=place)

    @torch.no_grad()
    def collect(self):
        """Move to the message what autograd has left in .grad. In 16 bits nothing may add up there."""
        came = [param for param in self.params if param.grad is not None]
        first = [param for param in came if param not in self.written]
        if first:
            torch._foreach_copy_([self.place(param) for param in first], [param.grad for param in first])
        for param in came:
            if param in self.written:
                self.place(param).add_(param.grad)
            param.grad = None
        self.written.update(first)

    def take_gradients(self):
        self.collect()
        for param in self.params:
            if param not in self.written:
                self.place(param).zero_()
        message = self.message
        if self.zero == 0 and message.is_cuda:  # there a collective that is called again on the same memory is replayed
            self.room = message, self.places
        self.forget()
        return message

    def forget(self):
        self.message = None
        self.places = {}
        self.written.clear()

    def zero_grad(self):
        super().zero_grad()
        self.forget()


class WrittenMatrices(WrittenUnit, UnitOfMatrices):
    """Muon's, with ZeRO."""
