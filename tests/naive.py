"""The equations of the paper, one row, one head, one query at a time: what the fast code equals."""

import math

import torch


def psi(t, centers, widths):
    return torch.stack(
        [
            torch.exp(-0.5 * ((t - c) / s) ** 2) / (s * math.sqrt(2 * math.pi))
            for c, s in zip(centers, widths, strict=True)
        ]
    )


def fit(x, positions, centers, widths, ridge, weights=None):
    """B = (F W F^T + ridge I)^-1 F W X, with W = I unless given.  -> N x e"""
    f = torch.stack([psi(t, centers, widths) for t in positions], dim=1)  # N x T
    fw = f if weights is None else f * weights
    return torch.linalg.inv(fw @ f.T + ridge * torch.eye(len(centers), dtype=f.dtype)) @ fw @ x


def gate(x, conv):
    """sigmoid(CNN(X)) * X for one row, or X without a gate.  T x e -> T x e"""
    if conv is None:
        return x
    return torch.sigmoid(conv(x.T[None])[0].T) * x


def write(memory, x, old, at=None, longest=None):
    """One row's new coefficients.  at: where the past is sampled, m/M if None; longest: what no
    sample of the past may exceed, if it is not taken evenly."""
    centers, widths = memory.store.basis.centers.to(x), memory.store.basis.widths.to(x)
    x = gate(x, memory.store.gate)
    t = torch.arange(1, len(x) + 1, dtype=x.dtype) / len(x)
    if old is None:
        return fit(x, t, centers, widths, memory.store.ridge)
    even, tau = (
        torch.arange(1, memory.store.samples + 1, dtype=x.dtype) / memory.store.samples,
        memory.store.schedule.tau,
    )
    past = torch.stack([old.T @ psi(p, centers, widths) for p in (even if at is None else at)])
    if at is not None:
        past = torch.stack([v * min(1, float(longest / v.norm())) for v in past])
    places = torch.cat([tau * even, tau + (1 - tau) * t])
    return fit(torch.cat([past, x]), places, centers, widths, memory.store.ridge)


def read(memory, query, coefficients):
    """One row.  query: H x T x d, coefficients: N x e.  -> T x e, mu, var: H x T"""
    h, t, d = query.shape
    centers, widths = memory.store.basis.centers.to(query), memory.store.basis.widths.to(query)
    keys = coefficients @ memory.reader.key.weight.T  # N x e
    values = coefficients @ memory.reader.value.weight.T
    z, mu, var = [], [], []
    for head in range(h):
        k, v = keys[:, head * d : (head + 1) * d], values[:, head * d : (head + 1) * d]
        for i in range(t):
            scores = k @ query[head, i] / math.sqrt(d)  # N
            a, b = memory.reader.locate(scores)
            m, s = torch.sigmoid(a), torch.nn.functional.softplus(b).clamp(min=1e-6)
            r = torch.stack(
                [
                    torch.exp(-0.5 * (m - c) ** 2 / (s + w**2))
                    / torch.sqrt(2 * math.pi * (s + w**2))
                    for c, w in zip(centers, widths, strict=True)
                ]
            )
            z.append(v.T @ r)
            mu.append(m)
            var.append(s)
    z = torch.stack(z).view(h, t, d).transpose(0, 1).reshape(t, h * d)
    return z @ memory.output.weight.T, torch.stack(mu).view(h, t), torch.stack(var).view(h, t)


def write_by_schedule(memory, x, old, held):
    """One row's new coefficients under a uniform or logarithmic schedule.  held: vectors before."""
    centers, widths = memory.store.basis.centers.to(x), memory.store.basis.widths.to(x)
    x, schedule, samples = gate(x, memory.store.gate), memory.store.schedule, memory.store.samples
    places, weights, values = [], [], []
    if hasattr(schedule, "tau"):
        tau = schedule.step(held, len(x)) if held else 0.0  # held / (held + new), rounded
        for m in range(samples if held else 0):
            at = (m + 0.5) / samples
            values.append(old.T @ psi(torch.tensor(at, dtype=x.dtype), centers, widths))
            places.append(tau * at)
            weights.append((tau / samples) / ((1 - tau) / len(x)))  # its room, by a vector's
        for i, vector in enumerate(x):
            values.append(vector)
            places.append(tau + (1 - tau) * (i + 0.5) / len(x))
            weights.append(1.0)
    else:
        a0, octaves = schedule.recent, math.log(1 + schedule.oldest / schedule.recent)
        for m in range(samples):
            at = (m + 0.5) / samples
            age = a0 * (math.exp((1 - at) * octaves) - 1)
            value = torch.zeros_like(x[0])
            if old is not None:
                value = old.T @ psi(torch.tensor(at, dtype=x.dtype), centers, widths)
            values.append(value)
            places.append(1 - math.log(1 + (age + len(x)) / a0) / octaves)
            slope = (1 + age / a0) / (1 + (age + len(x)) / a0)
            weights.append(slope / samples * a0 * octaves)
        for i, vector in enumerate(x):
            age = len(x) - i - 0.5
            values.append(vector)
            places.append(1 - math.log(1 + age / a0) / octaves)
            weights.append(1 / (1 + age / a0))
    places, weights = (torch.tensor(v, dtype=x.dtype) for v in (places, weights))
    return fit(torch.stack(values), places, centers, widths, memory.store.ridge, weights)


def read_gibbs(memory, query, coefficients, held):
    """One row.  query: H x T x d, coefficients: N x e.  -> T x e, p(t): H x T x D"""
    h, t, d = query.shape
    centers, widths = memory.store.basis.centers.to(query), memory.store.basis.widths.to(query)
    signal = []
    for p in range(memory.store.num_basis):
        at = torch.tensor((p + 0.5) / memory.store.num_basis, dtype=query.dtype)
        x = coefficients.T @ psi(at, centers, widths)
        if hasattr(memory.store.schedule, "oldest") and memory.store.schedule.age(at) > held:
            x = torch.zeros_like(x)  # nothing has come to be so old
        signal.append(x)
    long = [x / torch.sqrt((x**2).mean() + 1e-6) for x in signal]
    keys = torch.stack(long) @ memory.reader.key.weight.T
    values = torch.stack(signal) @ memory.reader.value.weight.T
    z, masses = [], []
    for head in range(h):
        own = slice(head * d, (head + 1) * d)
        for i in range(t):
            p = torch.softmax(keys[:, own] @ query[head, i] / math.sqrt(d), dim=0)
            found = p @ values[:, own]
            z.append(memory.reader.gain[head] * found / torch.sqrt((found**2).mean() + 1e-6))
            masses.append(p)
    z = torch.stack(z).view(h, t, d).transpose(0, 1).reshape(t, h * d)
    return z @ memory.output.weight.T, torch.stack(masses).view(h, t, -1)


def compressive_stream(memory, vectors, cuts):
    """One row's slots after each write, vector by vector: every c-th vector fills a slot, and the
    oldest slot goes when there are more than C.  vectors: n x e, cuts: how many come at a time."""
    slots, waiting, at, out = [], [], 0, []
    for size in cuts:
        for x in vectors[at : at + size]:
            waiting.append(x)
            if len(waiting) == memory.rate:
                group = torch.stack(waiting)  # c x e
                slots.append(memory.convolution(group.T[None])[0, :, 0])
                waiting = []
        slots = slots[max(0, len(slots) - memory.num_slots) :]
        at += size
        out.append(torch.stack(slots) if slots else vectors[:0])
    return out


def infini_write(memory, keys, values, state):
    """One row and head, vector by vector: M and z as the sums that they are in the paper.
    keys, values: n x d.  state: M and z, or None.  -> M: d x d, z: d"""
    d = keys.size(1)
    old = keys.new_zeros(d, d), keys.new_zeros(d)
    if state is not None:
        old = state[0].detach(), state[1].detach()
    matrix, normaliser = old
    for k, v in zip(keys, values, strict=True):
        f = infini_features(k)
        if memory.update == "delta" and state is not None:
            v = v - f @ old[0] / (f @ old[1])
        matrix, normaliser = matrix + torch.outer(f, v), normaliser + f
    return matrix, normaliser


def infini_read(query, own, state, beta):
    """One row and head, query by query: A = g A_mem + (1 - g) A_dot.  query, own: T x d"""
    if state is None:
        return own
    matrix, normaliser = state
    gate, out = 1 / (1 + torch.exp(-beta)), []
    for q, a in zip(query, own, strict=True):
        f = infini_features(q)
        out.append(gate * (f @ matrix / (f @ normaliser)) + (1 - gate) * a)
    return torch.stack(out)


def infini_features(x):
    return torch.stack([v + 1 if v > 0 else v.exp() for v in x])


class InfiniRow:
    """One row's matrices of a layer, with the vectors that it has taken counted."""

    def __init__(self, layer):
        self.memory, self.attention = layer.memory, layer.attention
        self.states, self.taken = [None] * layer.attention.num_heads, 0

    def heads(self, linear, x):
        """n x e -> H x n x d, of each part of the map"""
        parts = linear(x).split(x.size(1), dim=1)
        return [p.view(len(x), len(self.states), -1).transpose(0, 1) for p in parts]

    def mix(self, left, source, own):
        """Take what has left since, then read.  left: n x e, all that ever has; own: T x e"""
        new, self.taken = left[self.taken :], len(left)
        if len(new):
            keys, values = self.heads(self.attention.key_value, new)
            self.states = [
                infini_write(self.memory, k, v, state)
                for k, v, state in zip(keys, values, self.states, strict=True)
            ]
        (query,) = self.heads(self.attention.query, source)
        own = own.view(len(own), len(self.states), -1).transpose(0, 1)
        each = zip(query, own, self.states, self.memory.beta, strict=True)
        return torch.cat([infini_read(*head) for head in each], dim=1)


def select(candidates, count, policy):
    """Who stays of (number, vector, (looks, chances, surprise)): each policy in its turn takes the
    highest rated of what is left, of equals the newest."""
    ratings = {
        "looks": lambda number, marks: float(marks[0] / marks[1]),
        "surprise": lambda number, marks: float(marks[2]),
        "last": lambda number, marks: number,
        "random": lambda number, marks: 0,
    }
    stays, names = set(), policy.split(",")
    for turn, name in enumerate(names):
        left = [x for x in candidates if x[0] not in stays]
        left.sort(key=lambda x: (ratings[name](x[0], x[2]), x[0]), reverse=True)
        places = (turn + 1) * count // len(names) - turn * count // len(names)
        stays |= {number for number, _, _ in left[:places]}
    return [candidate for candidate in candidates if candidate[0] in stays]


def decoder(model, tokens, segment):
    """Transformer-XL, compressive transformer or Infini-attention on one row, segment by segment,
    with the whole past of every layer kept in lists, as a constant for the gradient; sinks are next
    to the short-term memory.  -> logits: T x V"""
    past = [[] for _ in model.layers]  # what each layer makes its keys from, one entry a token
    rows = [InfiniRow(layer) for layer in model.layers]
    outs, stm = [], model.stm_length
    for begin in range(0, len(tokens), segment):
        x = model.embed_tokens(tokens[begin : begin + segment]) * math.sqrt(model.dim)
        if model.token_shift is not None:
            before = [tokens[i - 1] if i else tokens[0] * 0 for i in range(begin, begin + len(x))]
            before = model.embed_tokens(torch.stack(before)) * math.sqrt(model.dim)
            x = x + model.token_shift * before
        for layer, kept, row in zip(model.layers, past, rows, strict=True):
            source = layer.attention_norm(x) if layer.normalize_before else x
            old = torch.stack(kept) if kept else source[:0]
            recent = old[max(0, len(old) - stm) :]
            left = old[: max(0, len(old) - stm)]
            sinks, left = left[: model.short_term.sinks], left[model.short_term.sinks :]
            context = [sinks, recent, source]
            if layer.memory is not None and layer.memory.num_slots:
                context.insert(0, compressive_stream(layer.memory, left, [len(left)])[0].detach())
            found = relative_heads(layer.attention, source, torch.cat(context))
            if layer.memory is not None and not layer.memory.num_slots:
                found = row.mix(left, source, found)
            found = layer.attention.output(found)
            x = x + found if layer.normalize_before else layer.attention_norm(x + found)
            y = layer.ffn_norm(x) if layer.normalize_before else x
            y = layer.outer(layer.activation(layer.inner(y)))
            x = x + y if layer.normalize_before else layer.ffn_norm(x + y)
            kept.extend(source.detach())
        outs.append(model.output_projection(model.norm(x)))
    return torch.cat(outs)


def relative_attention(module, x, context):
    """Transformer-XL's attention of one row, score by score.  x: T x e, context: P x e."""
    return module.output(relative_heads(module, x, context))


def relative_heads(module, x, context):
    """The same before the projection."""
    from fairseq_inf.modules import sinusoids

    t, e = x.shape
    p, h, d = len(context), module.num_heads, module.head_dim
    query = module.query(x).view(t, h, d)
    key, value = module.key_value(context).view(p, 2, h, d).unbind(1)
    out = torch.zeros(t, h, d, dtype=x.dtype)
    for i in range(t):
        for head in range(h):
            scores = []
            for j in range(p - t + i + 1):
                distance = torch.tensor([p - t + i - j])
                r = module.position(sinusoids(distance, e).to(x.dtype)).view(h, d)[head]
                content = (query[i, head] + module.content_bias[head]) @ key[j, head]
                position = (query[i, head] + module.position_bias[head]) @ r
                scores.append((content + position) / math.sqrt(d))
            weights = torch.softmax(torch.stack(scores), dim=0)
            out[i, head] = weights @ value[: len(scores), head]
    return out.view(t, e)


def gpt2(model, tokens, segment):
    """GPT-2 of one row, segment by segment, alone, with a compressive memory (attention to slots
    and segment as one, score by score) or with Infini-attention: what a memory adds to the
    attention of the segment alone has an output projection of its own.  -> logits: T x V"""
    past = [[] for _ in model.layers]
    rows = [InfiniRow(layer) for layer in model.layers]
    outs = []
    for begin in range(0, len(tokens), segment):
        part = tokens[begin : begin + segment]
        x = model.embed_tokens(part) + model.embed_positions.weight[: len(part)]
        for layer, kept, row in zip(model.layers, past, rows, strict=True):
            source = layer.attention_norm(x)
            found = gpt2_attention(layer.attention, source, source[:0])
            out = layer.attention.output(found)
            if layer.memory is not None:
                old = torch.stack(kept) if kept else source[:0]
                if layer.memory.num_slots:
                    slots = compressive_stream(layer.memory, old, [len(old)])[0].detach()
                    both = gpt2_attention(layer.attention, source, slots)
                else:
                    both = row.mix(old, source, found)
                out = out + (both - found) @ layer.memory.output.weight.T
            x = x + out
            y = layer.inner(layer.ffn_norm(x))
            y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
            x = x + layer.outer(y)
            kept.extend(source.detach())
        outs.append(model.norm(x) @ model.embed_tokens.weight.T)
    return torch.cat(outs)


def gpt2_attention(module, x, slots):
    """One row.  x: T x e, slots: C x e, the newest last.  -> T x e, before the projection"""
    t, e = x.shape
    c, h, d = len(slots), module.num_heads, module.head_dim
    query = module.query(x).view(t, h, d)
    key, value = module.key_value(torch.cat([slots, x])).view(c + t, 2, h, d).unbind(1)
    out = torch.zeros(t, h, d, dtype=x.dtype)
    for i in range(t):
        for head in range(h):
            slope = 2 ** (-8 * (head + 1) / h)
            scores = [
                query[i, head] @ key[j, head] / math.sqrt(d) - slope * max(c - j, 0)
                for j in range(c + i + 1)
            ]
            weights = torch.softmax(torch.stack(scores), dim=0)
            out[i, head] = weights @ value[: len(scores), head]
    return out.view(t, e)


def llama(model, tokens, segment):
    """Llama of one row, segment by segment, with or without a compressive memory, whose slots go
    back from the oldest vector of a short-term memory.  -> logits: T x V"""
    past = [[] for _ in model.layers]
    outs, stm, most = [], model.stm_length, model.short_term.sinks
    for begin in range(0, len(tokens), segment):
        x = model.embed_tokens(tokens[begin : begin + segment])
        for layer, kept in zip(model.layers, past, strict=True):
            source = rms_norm(layer.attention_norm, x)
            old = torch.stack(kept) if kept else source[:0]
            recent = old[max(0, len(old) - stm) :]
            left = old[: max(0, len(old) - stm)]
            sinks, left = left[:most], left[most:]
            keys = torch.cat([sinks, recent])
            distances = [most + stm - i for i in range(len(sinks))]
            distances += range(len(recent), 0, -1)
            args = (layer.attention, model.theta, source, keys, distances)
            found = rotary_attention(*args, source[:0], [])
            out = found @ layer.attention.output.weight.T
            if layer.memory is not None:
                slots = compressive_stream(layer.memory, left, [len(left)])[0].detach()
                back = range(len(slots), 0, -1)
                far = [stm + layer.memory.spacing * number for number in back]
                both = rotary_attention(*args, slots, far)
                out = out + (both - found) @ layer.memory.output.weight.T
            x = x + out
            y = rms_norm(layer.ffn_norm, x)
            gate = y @ layer.gate.weight.T
            x = x + (gate * torch.sigmoid(gate) * (y @ layer.inner.weight.T)) @ layer.outer.weight.T
            kept.extend(source.detach())
        outs.append(rms_norm(model.norm, x) @ model.output_projection.weight.T)
    return torch.cat(outs)


def rms_norm(norm, x):
    return torch.stack([norm.weight * y / torch.sqrt(y @ y / len(y) + norm.eps) for y in x])


def rotary_attention(module, theta, x, recent, distances, slots, far):
    """One row, score by score, each by the distance of query and key alone: with the halves of
    q and k as complex numbers, Re sum_m q_m conj(k_m) exp(i distance theta^(-2m/d)).
    x: T x e, recent: up to K + S x e, in those distances from the first of x, slots: C x e, that
    far.  -> T x e, before the projection"""
    t, e = x.shape
    h, d, groups = module.num_heads, module.head_dim, module.num_key_heads
    rates = theta ** (-torch.arange(0, d, 2, dtype=x.dtype) / d)
    query = module.query(x).view(t, h, d)
    context = torch.cat([slots, recent, x])
    key, value = module.key_value(context).view(len(context), 2, groups, d).unbind(1)
    before = len(slots) + len(recent)
    distances = far + distances
    out = []
    for i in range(t):
        for head in range(h):
            group, scores = head // (h // groups), []
            q = torch.complex(query[i, head, : d // 2], query[i, head, d // 2 :])
            for j in range(before + i + 1):
                distance = i + (distances[j] if j < before else before - j)
                k = torch.complex(key[j, group, : d // 2], key[j, group, d // 2 :])
                turn = torch.polar(torch.ones_like(rates), distance * rates)
                scores.append((q * k.conj() * turn).real.sum() / math.sqrt(d))
            weights = torch.softmax(torch.stack(scores), dim=0)
            out.append(weights @ value[: len(scores), group])
    return torch.stack(out).view(t, e)
