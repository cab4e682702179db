"""Packed documents: where they begin, the kernels' mask, what a run trains on, and how uneven a ring becomes. (Layouts
that equal each document trained alone are rows of tests/layouts.py.)"""

import torch

import kernels
from further.packed import packed, starts_of
from tests.kernels import random
from tests.pool import on_both, on_ranks, parametrize
from tests.memory import make_trainer
from tests.runs import TINY


def test_a_document_begins_behind_an_end_token():
    """A sequence may begin within one, and a document may be the end token alone."""
    x = torch.tensor([[5, 6, 0, 7, 0, 0, 8], [0, 1, 2, 3, 4, 5, 0]])
    assert starts_of(x, 0).tolist() == [[0, 0, 0, 3, 3, 5, 6], [0, 1, 1, 1, 1, 1, 1]]
    _, y, _ = packed(x, x + 1, 0)
    assert y.tolist() == [[6, 7, -1, 8, -1, -1, 9], [-1, 2, 3, 4, 5, 6, -1]]


# B, H, heads of keys, Tq, Tk, D, causal
SHAPES = [(2, 2, 2, 150, 150, 16, True), (1, 4, 2, 70, 70, 32, True), (2, 2, 1, 33, 90, 16, False)]


@parametrize("shape", SHAPES, ids=str)
@parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
def test_kernels_mask_other_documents(triton_kernels, shape, dtype, bound):
    """Forward and backward, beside float64's reference; rows that see no key among them."""
    B, H, shared, Tq, Tk, D, causal = shape
    q, k, v = (random(B, heads, tokens, D).to(dtype).requires_grad_()
               for heads, tokens in ((H, Tq), (shared, Tk), (shared, Tk)))
    starts = torch.randint(0, Tk + 1, (B, Tq), device=q.device).sort(1).values  # Tk: no key
    starts = starts.minimum(torch.arange(Tq, device=q.device)) if causal else starts
    starts[:, -1] = Tq - 1 if causal else Tk
    exact = [x.detach().double() for x in (q, k, v)]
    want, lse = kernels.attention_reference(*exact, causal, starts)
    o = kernels.FlashAttention.apply(q, k, v, causal, starts)
    do = torch.randn_like(o)
    o.backward(do)
    grads = kernels.attention_backward_reference(*exact, want, lse, do.double(), causal, starts)
    assert causal or lse.isinf().any()
    for ours, exact in zip((o.detach(), q.grad, k.grad, v.grad), (want, *grads)):
        assert (ours - exact).abs().max() <= bound * exact.abs().max()


@on_both
@on_ranks(1)
def test_a_run_packs_the_files_of_its_data(tmp_path):
    """--pack puts the end token between files; the token behind it is no target."""
    for number in range(100):
        (tmp_path / f"{number}.txt").write_text(f"document {number}\n")
    trainer = make_trainer([*TINY, "--data", str(tmp_path), "--pack"])
    tokens = trainer.train_data
    assert trainer.vocabulary.end_token == 0 and 80 < (tokens == 0).sum() < 100
    x, y, starts = (torch.cat(parts).cpu() for parts in trainer.micro_batches(tokens, 0, 0))
    assert (x == 0).any() and ((y == -1) == (x == 0)).all() and starts.equal(starts_of(x, 0))
    assert trainer.step(0).is_finite and trainer.evaluate() > 0
