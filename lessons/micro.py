"""Parallel training of a GPT in one file of plain Python, from messages up: python micro.py

It trains in twelve layouts, compares each with one process, and counts the numbers that ranks send.
A rank (on a cluster: a process with its GPU) is a generator. `yield "send", to, x` sends x to rank `to`.
`x = yield "recv", source` waits for a message from rank `source`. `y = yield from f(x)` calls a function that
sends or receives. Ranks share nothing else. All they send are lists of rows of C floats: x, weights, gradients.
"""
import math
import random
from collections import defaultdict

C, H, T, V, L, BATCH = 8, 4, 4, 12, 2, 4    # width, heads, tokens of a sequence, vocabulary, blocks, sequences
D = C // H                                  # width of a head

# ------------------------------------------------------------------------------------- messages
def run(ranks):
    """Let generators take turns until all return: (what each returned, how many numbers each sent)."""
    waits = dict.fromkeys(range(len(ranks)))        # rank -> the rank whose message it waits for, or None
    mail = defaultdict(list)                        # (from, to) -> messages, oldest first
    returned, sent = [None] * len(ranks), [0] * len(ranks)
    while waits:
        ready = [r for r, source in waits.items() if source is None or mail[source, r]]
        if not ready:
            raise RuntimeError("deadlock: " + ", ".join(f"rank {r} waits for {s}" for r, s in waits.items()))
        for r in ready:
            message = None if waits[r] is None else mail[waits[r], r].pop(0)
            try:
                kind, other, *x = ranks[r].send(message)        # rank r runs to its next yield
            except StopIteration as end:
                returned[r] = end.value
                del waits[r]
                continue
            if kind == "send":
                mail[r, other] += x                             # not copied: nobody changes rows in place
                sent[r] += len(x[0]) * C
            waits[r] = other if kind == "recv" else None
    return returned, sent

# ----------------------------------------------------------------------- collectives on a ring
# Each rank cuts its rows into N chunks. In each step it sends one to its right and takes one from its left.
# Reduce-scatter adds what comes: after N-1 steps rank i has the sum of all ranks' chunk i. Rank 0 begins
# with chunks a, rank 1 with b, rank 2 with c. The chunk in [ ] is sent next; [c+a]: rank 0 has added its a to c.
#     chunk    0    1    2            0     1     2             0      1      2
#     rank 0   a    a   [a]           a   [c+a]   a           b+c+a
#     rank 1  [b]   b    b     ->     b     b   [a+b]   ->           c+a+b
#     rank 2   c   [c]   c          [b+c]   c     c                         a+b+c
# All-gather then sends the sums round. A chunk is 1/N of K numbers, so a rank sends (N-1)/N K in each of the
# two, and 2 (N-1)/N K in an all-reduce: less than 2K, however many ranks there are.
def ring(ranks, me):                        # a group, as rank `me` sees it
    n, i = len(ranks), ranks.index(me)
    return n, i, ranks[(i + 1) % n], ranks[i - 1]                   # size, own number, right, left

def reduce_scatter(x, group):               # each rank has an x; rank i returns chunk i of the sum
    n, i, right, left = group
    chunks = split(x, n)
    for s in range(n - 1):
        yield "send", right, chunks[(i - 1 - s) % n]
        partial = yield "recv", left
        chunks[(i - 2 - s) % n] = add(partial, chunks[(i - 2 - s) % n])
    return chunks[i]

def all_gather(chunk, group):               # rank i has chunk i; each returns all, joined
    n, i, right, left = group
    chunks = {i: chunk}
    for s in range(n - 1):
        yield "send", right, chunks[(i - s) % n]
        chunks[(i - 1 - s) % n] = yield "recv", left
    return [row for c in range(n) for row in chunks[c]]

def all_reduce(x, group):                   # each rank has an x; each returns the sum
    chunk = yield from reduce_scatter(x, group)
    return (yield from all_gather(chunk, group))

# ----------------------------------------------------------------------- matrices: lists of rows
def split(rows, n):
    return [rows[len(rows) * i // n:len(rows) * (i + 1) // n] for i in range(n)]
def zeros(rows):
    return [[0.0] * C for _ in range(rows)]
def add(a, b, scale=1.0):                                           # a + scale b
    return [[u + scale * v for u, v in zip(*rows)] for rows in zip(a, b)]
def transpose(a):
    return [list(column) for column in zip(*a)]
def dot(u, v):
    return sum(a * b for a, b in zip(u, v))
def matmul(a, b):                                                   # (n, m), (m, k) -> (n, k)
    columns = transpose(b)
    return [[dot(row, column) for column in columns] for row in a]

# --------------------------------------------------------------- a GPT, and its backward by hand
# dy is the gradient of the loss by y. If y = x w, then dx = dy w^T and dw = x^T dy.
# Each forward returns its output and what its backward needs. At first skip what norm and attention do backward.
def norm(x):                                # y = r x, with r = 1 / sqrt(mean of x^2), row by row
    r = [1 / math.sqrt(dot(row, row) / C + 1e-5) for row in x]      # (T)
    return [[scale * v for v in row] for scale, row in zip(r, x)], r

def norm_backward(dy, y, r):                # dx = r (dy - y m), with m = mean of dy y
    m = [dot(*rows) / C for rows in zip(dy, y)]                     # (T)
    return [[r[t] * (dy[t][c] - y[t][c] * m[t]) for c in range(C)] for t in range(T)]

def softmax(s):                             # p = exp(s) / sum of exp(s), of one row
    e = [math.exp(v - max(s)) for v in s]
    return [v / sum(e) for v in e]

def attention(x, w):                        # (T, C), (4C, C): each head has 4D rows of w
    """q = x wq^T, k = x wk^T, v = x wv^T, p = softmax(q k^T / sqrt(D)), o = p v, y = sum of heads' o wo"""
    y, saved = zeros(T), []
    for head in split(w, len(w) // (4 * D)):
        wq, wk, wv, wo = split(head, 4)                             # (D, C)
        q, k, v = [matmul(x, transpose(rows)) for rows in (wq, wk, wv)]       # (T, D)
        s = [[dot(q[t], k[u]) / math.sqrt(D) for u in range(t + 1)] for t in range(T)]
        p = [softmax(row) + [0.0] * (T - len(row)) for row in s]    # (T, T), 0 for later tokens
        o = matmul(p, v)                                            # (T, D)
        y = add(y, matmul(o, wo))                                   # (T, C)
        saved.append((q, k, v, p, o))
    return y, saved

def attention_backward(dy, x, w, saved):
    """do = dy wo^T, dp = do v^T, ds = p (dp - sum of the row's p dp) / sqrt(D),
    dq = ds k, dk = ds^T q, dv = p^T do, and dx, dw as above"""
    dx, dw = zeros(T), []
    for head, (q, k, v, p, o) in zip(split(w, len(saved)), saved):
        wq, wk, wv, wo = split(head, 4)
        do = matmul(dy, transpose(wo))                              # (T, D)
        dp = matmul(do, transpose(v))                               # (T, T)
        ds = [[a * (b - dot(*rows)) / math.sqrt(D) for a, b in zip(*rows)] for rows in zip(p, dp)]
        dq, dk, dv = matmul(ds, k), matmul(transpose(ds), q), matmul(transpose(p), do)
        for d, rows in (dq, wq), (dk, wk), (dv, wv):
            dx = add(dx, matmul(d, rows))
            dw += matmul(transpose(d), x)
        dw += matmul(transpose(o), dy)
    return dx, dw                                                   # (T, C), (4C, C)

def mlp(x, w):                              # (T, C), (8C, C): rows 2j and 2j + 1 of w are hidden unit j's
    """h = x wup^T, a = max(h, 0), y = a wdown"""
    up, down = w[0::2], w[1::2]                                     # (4C, C)
    h = matmul(x, transpose(up))                                    # (T, 4C)
    a = [[max(v, 0.0) for v in row] for row in h]
    return matmul(a, down), (h, a)

def mlp_backward(dy, x, w, saved):          # dh = da where h > 0, else 0
    up, down, (h, a) = w[0::2], w[1::2], saved
    da = matmul(dy, transpose(down))
    dh = [[d if v > 0 else 0.0 for d, v in zip(*rows)] for rows in zip(da, h)]
    dup, ddown = matmul(transpose(dh), x), matmul(transpose(a), dy)
    return matmul(dh, up), [row for unit in zip(dup, ddown) for row in unit]

# ---------------------------------------------------------------------- tensor parallelism: f, g
# Attention is a sum over heads, the MLP over hidden units. Each rank has some, with their rows of w: a term of y.
#          ┌─ x ─ rank 0's heads or units ─ y_0 ─┐
#     x ─ f                                       g ─ y      f: forward nothing, backward an all-reduce of dx
#          └─ x ─ rank 1's heads or units ─ y_1 ─┘           g: forward an all-reduce of y, backward nothing
g_forward = f_backward = all_reduce

# ------------------------------------ the model's pieces: embedding, attention, MLP, ..., head
HEAD = 2 * L + 1                            # the last piece's number
ROWS = [V + T, *[4 * C, 8 * C] * L, V]      # of each piece's weights
K = C * sum(ROWS)                           # numbers in all weights

def forward(piece, x, w, tokens, tp):       # a layer: x + layer(norm(x)); the head: its part of the mean loss
    if piece == 0:                          # each row of e has two ones: for its token and for its position
        e = [[float(v in (tokens[t], V + t)) for v in range(V + T)] for t in range(T)]
        return matmul(e, w), e                                      # (T, V + T), (V + T, C) -> (T, C)
    y, r = norm(x)
    if piece == HEAD:
        p = [softmax(row) for row in matmul(y, transpose(w))]       # (T, V)
        return -sum(math.log(p[t][tokens[t + 1]]) for t in range(T)) / (BATCH * T), (y, r, p)
    term, kept = attention(y, w) if piece % 2 else mlp(y, w)
    return add(x, (yield from g_forward(term, tp))), (y, r, kept)

def backward(piece, dx, w, saved, tokens, tp):      # dx: of the piece's output -> dx of its input, dw
    if piece == 0:
        return None, matmul(transpose(saved), dx)
    y, r, kept = saved
    if piece == HEAD:                       # z = y w^T, dz = (p - 1 at the target) / tokens of a batch
        dz = [[(kept[t][v] - (v == tokens[t + 1])) / (BATCH * T) for v in range(V)] for t in range(T)]
        return norm_backward(matmul(dz, w), y, r), matmul(transpose(dz), y)
    dy, dw = attention_backward(dx, y, w, kept) if piece % 2 else mlp_backward(dx, y, w, kept)
    return add(dx, norm_backward((yield from f_backward(dy, tp)), y, r)), dw

# ---------------------------------------------------------------------------- a step is one list
# An action is a letter, for a piece of the model and a micro-batch:
#     F  forward     G  gather the piece's weights      R  receive x (in backward dx) from another stage
#     B  backward    D  drop them                       S  send it to another stage
#                    A  add up replicas' gradients of the mean loss: at stage 0 by all-reduce, else by reduce-scatter
# The stages of ZeRO are four lines of letters. In a step, a piece has
ZERO = {  # first F   other F   other B   last B        and of N replicas each keeps 1/N of
    0:    ("F",       "F",      "B",      "BA"),      # nothing: this is data parallelism
    1:    ("GF",      "F",      "B",      "BA"),      # the optimizer's state
    2:    ("GF",      "F",      "BA",     "BA"),      # and gradients
    3:    ("GFD",     "GFD",    "GBDA",   "GBDA")}    # and weights
#     ZeRO-0     F0 F1 F2   B2 A2 B1 A1 B0 A0                    one micro-batch, pieces 0, 1 and 2
#     ZeRO-1     G0 F0 G1 F1 G2 F2   B2 A2 B1 A1 B0 A0
#     ZeRO-3     G0 F0 D0 G1 F1 D1 G2 F2 D2   G2 B2 D2 A2 G1 B1 D1 A1 G0 B0 D0 A0

# A pipeline's stage runs as many F ahead as stages follow, then F and B in turn. Numbers are micro-batches:
#     stage 0    F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
#     stage 1    .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
#     stage 2    .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..
def one_f_one_b(stage, stages, micro_batches):
    ahead = min(stages - 1 - stage, micro_batches)
    order = [("F", m) for m in range(ahead)]
    for m in range(ahead, micro_batches):
        order += [("F", m), ("B", m - ahead)]
    return order + [("B", m) for m in range(micro_batches - ahead, micro_batches)]

def step_list(zero, stage, stages, micro_batches):
    """A rank's step: [(letter, piece, micro-batch)]. R and S have the other stage in place of a piece."""
    first_f, other_f, other_b, last_b = ZERO[zero]
    pieces = split(range(HEAD + 1), stages)[stage]
    actions = []
    for kind, m in one_f_one_b(stage, stages, micro_batches):
        if kind == "F":
            letters = first_f if m == 0 else other_f
        else:
            letters = last_b if m == micro_batches - 1 else other_b
        way = 1 if kind == "F" else -1
        if stage - way in range(stages):
            actions.append(("R", stage - way, m))
        actions += [(letter, piece, m) for piece in pieces[::way] for letter in letters]
        if stage + way in range(stages):
            actions.append(("S", stage + way, m))
    return actions

# -------------------------------------------------------------------------- a rank runs its list
class Rank:                                 # one of dp replicas of pp stages of tp ranks
    def __init__(self, me, model, dp, tp, pp, zero):
        stage, self.replica, t = me // (dp * tp), me // tp % dp, me % tp
        self.tp = ring([me - t + i for i in range(tp)], me)
        self.dp = ring([me + (i - self.replica) * tp for i in range(dp)], me)
        self.stages = range(me % (dp * tp), dp * tp * pp, dp * tp)  # my peers, one in each stage
        self.actions = step_list(zero, stage, pp, BATCH // dp)      # dp divides BATCH
        self.average = reduce_scatter if zero else all_reduce
        self.mine = {}                                              # what this rank's optimizer steps
        for piece in split(range(HEAD + 1), pp)[stage]:
            rows = split(model[piece], tp)[t] if 0 < piece < HEAD else model[piece]
            self.mine[piece] = split(rows, dp)[self.replica] if zero else rows
        self.whole = {} if zero else self.mine                      # what F and B compute with
        self.momentum = {piece: zeros(len(rows)) for piece, rows in self.mine.items()}

    def step(self, batch):                  # returns this rank's part of the loss
        sequences = split(batch, self.dp[0])[self.replica]          # each is a micro-batch
        x, saved, grads, averages = {}, {}, {}, {}                  # x[m]: in backward its gradient
        loss = 0.0
        for letter, piece, m in self.actions:
            if letter == "F":
                x[m], saved[piece, m] = yield from forward(
                    piece, x.get(m), self.whole[piece], sequences[m], self.tp)
                loss += x[m] if piece == HEAD else 0.0
            elif letter == "B":
                x[m], dw = yield from backward(
                    piece, x[m], self.whole[piece], saved.pop((piece, m)), sequences[m], self.tp)
                grads[piece] = add(grads[piece], dw) if piece in grads else dw
            elif letter == "G":
                self.whole[piece] = yield from all_gather(self.mine[piece], self.dp)
            elif letter == "D":
                del self.whole[piece]
            elif letter == "A":
                dw = yield from self.average(grads.pop(piece), self.dp)
                averages[piece] = add(averages[piece], dw) if piece in averages else dw
            elif letter == "R":
                x[m] = yield "recv", self.stages[piece]
            elif letter == "S":
                yield "send", self.stages[piece], x[m]
        for piece, dw in averages.items():                          # the optimizer: SGD with momentum
            self.momentum[piece] = add(dw, self.momentum[piece], 0.9)
            self.mine[piece] = add(self.mine[piece], self.momentum[piece], -0.1)
        return loss

# ------------------------------------------------- it equals one process, and sends what it should
LAYOUTS = [  # dp, tp, pp, ZeRO, and the lecture's formula: how many numbers a rank sends in a step
    (4, 1, 1, 0, f"{2 * 3/4 * K = :.0f}"),                          # all-reduce: 2 (N-1)/N K
    (4, 1, 1, 1, f"{2 * 3/4 * K = :.0f}"),                          # all-gather, reduce-scatter: the same
    (4, 1, 1, 2, f"{2 * 3/4 * K = :.0f}"),                          # the same
    (4, 1, 1, 3, f"{3 * 3/4 * K = :.0f}"),                          # one more all-gather: 3 (N-1)/N K
    (2, 1, 1, 2, f"{(1 + 2) * 1/2 * K = :.0f}"),                    # two micro-batches: one G, two A
    (2, 1, 1, 3, f"{(4 + 2) * 1/2 * K = :.0f}"),                    # two micro-batches: four G, two A
    (1, 4, 1, 0, f"{BATCH * 2 * 2*L * 2 * 3/4 * T*C = :.0f}"),      # each layer's F and B: an all-reduce
    (1, 1, 3, 0, f"{BATCH * T*C = :.0f}"),                          # first stage x, last dx, second both
    (2, 2, 1, 0, ""), (2, 1, 2, 3, ""), (1, 2, 2, 0, ""), (2, 2, 2, 3, "")]

def trained(dp, tp, pp, zero):              # two steps: (ranks, losses, how many numbers each sent in a step)
    draw = random.Random(0)
    model = [[[draw.gauss(0, 0.3) for _ in range(C)] for _ in range(rows)] for rows in ROWS]
    batches = [[[draw.randrange(V) for _ in range(T + 1)] for _ in range(BATCH)] for _ in range(2)]
    ranks = [Rank(me, model, dp, tp, pp, zero) for me in range(dp * tp * pp)]
    losses = []
    for batch in batches:
        parts, sent = run([rank.step(batch) for rank in ranks])
        losses.append(sum(parts[::tp]))                             # tp ranks return the same part
    return ranks, losses, sent

def furthest(ranks, losses, one, one_losses, layout):   # the largest difference of a loss or a weight
    far = [abs(a - b) for a, b in zip(losses, one_losses)]
    for me, rank in enumerate(ranks):
        for piece, rows in Rank(me, one.mine, *layout).mine.items():
            far += [abs(a - b) for both in zip(rows, rank.mine[piece]) for a, b in zip(*both)]
    return max(far)

def main():
    """The lecture in one file of plain Python: layouts beside one process, and how many numbers they send."""
    (one,), one_losses, _ = trained(1, 1, 1, 0)
    print(f"A GPT of K = {K} weights. One process: losses {one_losses[0]:.4f}, {one_losses[1]:.4f}. Others:")
    print("dp tp pp ZeRO   off by   sent by a rank of each stage, and the formula")
    for dp, tp, pp, zero, formula in LAYOUTS:
        ranks, losses, sent = trained(dp, tp, pp, zero)
        far = furthest(ranks, losses, one, one_losses, (dp, tp, pp, zero))
        print(f"{dp:2} {tp:2} {pp:2} {zero:4}   {far:6.0e}  ", *sent[::dp * tp], " ", formula)

if __name__ == "__main__":
    main()

# Here                   In full                                          What that adds
# run                    collectives.py Link                              processes, GPUs
# reduce_scatter ...     collectives.py ring_reduce_scatter, ring_all_gather, ring_all_reduce     tensors
# forward, backward      model.py Block, GPT                              GPT-2's biases, GELU; autograd
# g_forward, f_backward  parallel.py ReduceFromGroup, CopyToGroup         autograd calls them
# A of ZeRO-0            parallel.py average_gradients                    any module
# ZERO, step_list        parallel.py with_weights                         G earlier; none where the weights stay
# one_f_one_b            parallel.py one_f_one_b                          further/schedules.py: less idle time
# Rank                   parallel.py Unit, Pipeline                       it computes while messages travel
