"""--comm torch: torch.distributed's own collectives in place of ours.

    torchrun --nproc_per_node 2 train.py --dp 2 --comm torch
    import further.library; dist.use(group, "torch")            in a program of your own
"""

import functools
import inspect

import torch
import torch.distributed as torch_dist

import collectives as dist


SINCE_2_13 = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}


@functools.cache
def arguments_of(name):
    """The names of the arguments that `run` gets of torch.distributed's function of this name."""
    return [p for p in inspect.signature(getattr(torch_dist, name)).parameters if p not in ("group", "async_op")]


class Library(dist.Link):
    """The library's collectives. They are not counted.

    Our collectives take tensors of any shape with the right number of elements. Three of the library's want contiguous
    tensors, and two of these want shapes that fit, too. `run` gives them copies that do, and copies the output back.
    """
    outputs = {"all_gather_into_tensor": "output_tensor", "reduce_scatter_tensor": "output",
               "all_to_all_single": "output"}

    @torch.no_grad()
    def run(self, name, async_op, algorithm, *arguments):
        with dist.inference_where(arguments):
            return self.call(name, async_op, *arguments)

    def call(self, name, async_op, *arguments):
        function = getattr(torch_dist, SINCE_2_13.get(name, name), None) or getattr(torch_dist, name)
        call = functools.partial(function, group=self.group, async_op=async_op)
        arguments = dict(zip(arguments_of(name), arguments))
        if name not in self.outputs:
            return call(**arguments)
        given = {key: t for key, t in arguments.items() if isinstance(t, torch.Tensor)}
        flats = {key: dist.flatten(t) for key, t in given.items()}
        if name == "all_to_all_single":  # whose split sizes count rows
            arguments |= {key: flat.view(given[key].shape) for key, flat in flats.items()}
        else:
            arguments |= flats
        handle = call(**arguments) or dist.Handle()
        output = self.outputs[name]

        @torch.no_grad()
        def wait():  # and copy back what was made contiguous
            handle.wait()
            with dist.inference_where([given[output]]):
                dist.unflatten(flats[output], given[output])

        return dist.Handle(wait, handle.is_completed) if async_op else wait()


dist.LINKS.setdefault("torch", Library)  # what a program has put there stays
