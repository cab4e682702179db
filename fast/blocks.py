"""Transformer blocks that make fewer passes over memory."""

from fast import norm
from fast.linear import add_bias
from model import MLP, Block, Linear


# ------------------------------------------------------------------------------------------------------ fused blocks
#
# Between matrix products a block is bound by memory. These subclasses make fewer passes over it, by kernels that do two
# operations at once. The price: a layer leaves its bias, or its addition to the residual stream, to the next layer.

class ProductLinear(Linear):
    """A Linear that can leave out its bias, because the activation's kernel adds it without another pass."""

    def product(self, x):
        return self.linear(x, self.weight)


class FusedMLP(MLP):
    """The activation's kernel also adds the first layer's bias, and its backward sums the bias's gradient."""

    def __init__(self, config):
        super().__init__(config)
        self.c_fc = ProductLinear(config.n_embd, config.inner)

    def forward(self, x):
        if not hasattr(self.c_fc, "product"):  # a tensor-parallel layer that always adds its bias
            return super().forward(x)
        return self.c_proj(add_bias(self.activation, self.c_fc.product(x), self.c_fc.bias))


class FusedBlock(Block):
    """One kernel adds a sublayer's output to the residual stream and takes the norm: 4 passes over memory, not 5."""

    def __init__(self, config, number):
        super().__init__(config, number)
        if isinstance(self.mlp, MLP):
            self.mlp = FusedMLP(config)

    def forward(self, x):
        one, two = self.ln_1, self.ln_2
        x, y = norm.add_layer_norm(x, None, one.weight, one.bias, one.eps)  # with x: one backward for both its uses
        x, y = norm.add_layer_norm(x, self.attn(y), two.weight, two.bias, two.eps)
        return x + self.mlp(y)
