from types import SimpleNamespace

import naive
import pytest
import torch
from zoo import WORDS, learn, losses_and_logs, make_model, stream, text

from fairseq_inf.analysis.regression import regression_error
from fairseq_inf.criterions.cross_entropy_with_kl import CrossEntropyWithKL, remembered
from fairseq_inf.memory import side_by_side
from fairseq_inf.modules import RelativeAttention, sinusoids
from fairseq_inf.tasks.long_sequence_lm import LongSequenceLMConfig, LongSequenceLMTask


def assert_equal(slowly, decoder, tokens, segment):
    """A row read segment by segment is what `slowly` makes of it, and so are the gradients."""
    state, outs = decoder.initial_state(1), []
    for part in tokens.split(segment, dim=1):
        out, state, _ = decoder(part, state)
        outs.append(out[0])
    fast, slow = torch.cat(outs), slowly(decoder, tokens[0], segment)
    assert torch.allclose(fast, slow, atol=1e-6)
    weight = torch.randn_like(fast)
    variables = {k: p for k, p in decoder.named_parameters() if ".convolution." not in k}
    grads = [torch.autograd.grad((x * weight).sum(), variables.values()) for x in (fast, slow)]
    for name, one, two in zip(variables, *grads, strict=True):
        assert torch.allclose(one, two, atol=1e-5), name


@pytest.mark.parametrize("queries,past", [(1, 0), (1, 5), (7, 0), (7, 4), (3, 9)])
def test_attention_equals_the_naive_one_with_its_gradients(queries, past):
    torch.manual_seed(1)
    module = RelativeAttention(8, 2).double()
    torch.nn.init.normal_(module.content_bias)
    torch.nn.init.normal_(module.position_bias)
    context = torch.randn(2, past + queries, 8, dtype=torch.float64)
    x = context[:, past:].clone().requires_grad_()
    full = torch.cat([context[:, :past], x], dim=1)
    places = torch.arange(past + queries - 1, -2, -1)
    hidden = torch.full((queries, past + queries), -torch.inf, dtype=torch.float64).triu(past + 1)
    key, value = module.project(full)
    out = module.attend(module.queries(x), key, value, (sinusoids(places, 8).double(), hidden))
    out = module.output(side_by_side(out))
    expected = torch.stack(
        [naive.relative_attention(module, a, b) for a, b in zip(x, full, strict=True)]
    )
    assert torch.allclose(out, expected, atol=1e-6)
    weight = torch.randn_like(out)
    variables = [x, *module.parameters()]
    fast = torch.autograd.grad((out * weight).sum(), variables, retain_graph=True)
    slow = torch.autograd.grad((expected * weight).sum(), variables)
    for a, b in zip(fast, slow, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("name", ["transformer_xl", "compressive_transformer", "infini_attention"])
@pytest.mark.parametrize("post_norm", [False, True])
@pytest.mark.parametrize("stm,segment,sinks", [(6, 5, 0), (7, 3, 2), (0, 4, 0)])
def test_baselines_equal_naive_ones_with_their_gradients(name, post_norm, stm, segment, sinks):
    sizes = {"stm_length": stm, "sink_tokens": sinks, "decoder_post_norm": post_norm}
    decoder = make_model(name, **sizes).double().decoder
    for layer in decoder.layers:
        torch.nn.init.normal_(layer.attention.content_bias)
        torch.nn.init.normal_(layer.attention.position_bias)
    assert_equal(naive.decoder, decoder, text(1, 38), segment)


def test_a_token_shift_of_zero_adds_nothing_at_first_and_changes_no_other_weight():
    plain, shifted = (make_model("gibbs", token_shift=x).decoder for x in (None, 0.0))
    for name, x in plain.state_dict().items():
        assert torch.equal(x, shifted.state_dict()[name]), name
    tokens = text(2, 40)
    assert torch.equal(stream(plain, tokens, 5)[0], stream(shifted, tokens, 5)[0])
    shifted(tokens[:, :5], shifted.initial_state(2))[0].sum().backward()
    assert shifted.token_shift.grad.abs().min() > 0


@pytest.mark.parametrize("longer", [13, 40])
def test_any_length_of_the_short_term_memory_in_evaluation(longer):
    model = make_model("transformer_xl", stm_length=6).double()
    other = make_model("transformer_xl", stm_length=longer).double()
    other.load_state_dict(model.state_dict())
    tokens = text(1, 40)
    out, _ = stream(other.decoder, tokens, 5)
    assert torch.allclose(out[0], naive.decoder(other.decoder, tokens[0], 5), atol=1e-6)
    assert not torch.allclose(out, stream(model.decoder, tokens, 5)[0], atol=1e-3)


def test_the_reconstruction_loss_teaches_the_compression_alone():
    model = make_model("compressive_transformer").train()
    losses = []
    for i in range(5):
        model.zero_grad()
        out, found = learn(model, text(3, 5, seed=i), i == 0)
        losses.append(found["reconstruction"].item())
        found["reconstruction"].backward(retain_graph=True)
        for name, p in model.named_parameters():
            if ".memory." in name:
                assert p.grad is not None and (p.grad.abs().sum() > 0) == (losses[-1] > 0), name
            else:
                assert p.grad is None or p.grad.abs().sum() == 0, name
        model.zero_grad()
        out.sum().backward()  # and the model's own loss teaches it nothing
        for name, p in model.named_parameters():
            assert ".memory." not in name or p.grad is None or p.grad.abs().sum() == 0, name
    # 6 vectors of short-term memory, 5 tokens: 4 have left after two segments
    assert [loss > 0 for loss in losses] == [False, False, True, True, True]


def test_the_reconstruction_loss_is_that_of_attention_by_content():
    """Ragged rows too: one made no slot, one made fewer than the others, padding counts nothing."""
    model = make_model("compressive_transformer", decoder_layers=1, token_shift=None)
    model = model.double().train()
    decoder, layer = model.decoder, model.decoder.layers[0]
    torch.nn.init.normal_(layer.attention.content_bias)
    with torch.no_grad():
        state = decoder.initial_state(3)
        for lengths in ([5, 5, 5], [5, 4, 1]):
            _, state, _ = decoder(text(3, 5), state, torch.tensor(lengths))
    tokens, lengths = text(3, 5, seed=7), [5, 3, 5]
    _, _, extra = decoder(tokens, state, torch.tensor(lengths))
    losses, _ = losses_and_logs(extra, tokens)
    expected, h, d = 0, 2, 8
    for row, left in enumerate((4, 3, 0)):  # 10, 9 and 6 vectors, of which 6 stay
        old = state.layers[0].window.vectors[row, 5 - left : 5][: left // 3 * 3]
        if not len(old):
            continue
        new = torch.stack(
            [layer.memory.convolution(old.T[None])[0].T[i] for i in range(len(old) // 3)]
        )
        source = layer.attention_norm(decoder.embed_tokens(tokens[row]) * 4)
        query = layer.attention.query(source).view(5, h, d)[: lengths[row]]
        found = []
        for vectors in (old, new):
            key, value = layer.attention.key_value(vectors).view(-1, 2, h, d).unbind(1)
            scores = torch.einsum("thd,phd->htp", query + layer.attention.content_bias, key)
            weights = torch.softmax(scores / d**0.5, dim=-1)
            found.append(torch.einsum("htp,phd->thd", weights, value))
        expected = expected + (found[0] - found[1]).square().mean(dim=(1, 2)).sum()
    assert losses["reconstruction"].item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("post_norm", [False, True])
def test_short_term_memory_as_long_as_the_text_equals_one_long_segment(post_norm):
    """Without a long-term memory, a cut stream is the same as an uncut one."""
    decoder = make_model("transformer_xl", stm_length=63, decoder_post_norm=post_norm).decoder
    tokens = text(2, 63)
    whole, _ = stream(decoder, tokens, 63)
    for segment in (1, 7, 10):
        cut, _ = stream(decoder, tokens, segment)
        assert torch.allclose(whole, cut, atol=1e-5)


def test_what_leaves_the_short_term_memory_is_written_in_order():
    """S = 6, segments of 4: nothing leaves after one, 2 after two, 4 after each later one."""
    decoder = make_model().decoder
    state = decoder.initial_state(1)
    held = []
    for part in text(1, 20).split(4, dim=1):
        _, state, _ = decoder(part, state)
        held.append(
            (state.layers[0].memory.tokens.item(), state.filled.item(), state.position.item())
        )
    assert held == [(0, 4, 4), (0, 8, 8), (2, 10, 12), (6, 10, 16), (10, 10, 20)]


def test_the_vectors_that_leave_are_the_oldest():
    decoder = make_model(decoder_layers=1, token_shift=None).decoder
    _, state = stream(decoder, text(1, 8), 4)
    tokens = text(1, 8)
    source = decoder.layers[0].attention_norm(decoder.embed_tokens(tokens) * 4)
    assert torch.allclose(state.layers[0].window.vectors[0, -8:], source[0], atol=1e-6)
    _, after, _ = decoder(text(1, 4, seed=8), state)
    alone = decoder.layers[0].memory
    query = torch.zeros(1, 2, 1, 8)
    _, _, expected = alone(query, source[:, :2], alone.initial_state(1))
    assert torch.allclose(after.layers[0].memory.coefficients, expected.coefficients, atol=1e-6)


def test_without_short_term_memory_a_segment_is_written_when_it_ends():
    decoder = make_model(stm_length=0).decoder
    _, state = stream(decoder, text(1, 5), 5)
    assert state.layers[0].memory.tokens.item() == 0
    _, state = stream(decoder, text(1, 5), 5, state)
    assert state.layers[0].memory.tokens.item() == 5


def test_the_memory_reaches_beyond_the_short_term_memory():
    """A token far back changes the output with a long-term memory, and only with it."""
    tokens = text(1, 60)
    other = tokens.clone()
    other[0, 0] = 4 + (tokens[0, 0] - 3) % (WORDS - 4)
    for name, differs in (
        ("infinite_former", True),
        ("compressive_transformer", True),
        ("infini_attention", True),
        ("transformer_xl", False),
    ):
        decoder = make_model(name).decoder
        a, _ = stream(decoder, tokens, 5)
        b, _ = stream(decoder, other, 5)
        # through two layers of short-term memory a token acts on 2 * 6 + 5 later ones
        assert (not torch.equal(a[:, 20:], b[:, 20:])) == differs


def test_a_batch_that_fairseq_repeats_under_amp_is_read_once(data_bin):
    """After an overflow the trainer gives the whole group of batches again."""
    cfg = LongSequenceLMConfig(data=str(data_bin), tokens_per_sample=5)
    cfg.amp, cfg.train_subset, cfg.dataset_impl, cfg.path = True, "train", None, None
    task = LongSequenceLMTask.setup_task(cfg)
    task.model = make_model(words=task.source_dictionary).train()
    task.load_dataset("train")
    batches = task.get_batch_iterator(task.dataset("train"), max_sentences=2, epoch=1)
    batches = iter(batches.next_epoch_itr())
    criterion = CrossEntropyWithKL(task, 0, 0.1)
    optimizer = SimpleNamespace(backward=lambda loss: loss.backward())
    read = []
    for update in range(3):
        group = [next(batches), next(batches)]
        for _ in range(1 if update == 1 else 2):
            for sample in group:
                task.train_step(sample, task.model, criterion, optimizer, update)
            read.append(task.model.states[True].position.tolist())
    assert read == [[10, 10], [10, 10], [20, 20], [30, 30], [30, 30]]


def test_a_stream_that_never_began_is_refused():
    with pytest.raises(ValueError, match="starts"):
        make_model()(text(2, 5), None, torch.tensor([False, True]))


def test_the_share_of_the_memory_leaves_padding_out():
    model = make_model()
    _, state = stream(model.decoder, text(2, 30), 5)
    tokens = text(2, 5, seed=8)
    padded = torch.cat([tokens, torch.full((2, 20), 1)], dim=1)
    with torch.no_grad():
        _, _, extra = model.decoder(tokens, state)
        _, _, other = model.decoder(padded, state, torch.tensor([5, 5]))
    real = torch.nn.functional.pad(torch.ones_like(tokens), (0, 20)).bool()
    (one, of_one), (two, of_two) = (
        remembered(x, y, {"kl_sigma": 0.1})[1]["ltm_share"]
        for x, y in ((extra, tokens > 0), (other, real))
    )
    assert two / of_two == pytest.approx(float(one / of_one), rel=1e-4)


def test_auto_is_one_width_as_wide_as_the_functions_are_apart():
    memory = make_model(ltm_basis=16, ltm_widths="auto").decoder.layers[0].memory
    assert memory.store.basis.distinct_widths == (1 / 16,)
    assert memory.store.basis.centers[1] - memory.store.basis.centers[0] == pytest.approx(1 / 15)


def test_the_regression_error_is_that_of_every_vector_at_its_place():
    """Followed by hand: a vector of the first write at t = i/T is at tau t after the second."""
    decoder = make_model(ltm_sticky=False, ltm_tau=0.6, stm_length=4).decoder
    tokens = text(2, 16)
    found = regression_error(decoder, tokens, 4)
    state, stored = decoder.initial_state(2), []
    with torch.no_grad():
        for part in tokens.split(4, dim=1):
            stored.append([x[:, -4:] for x in (own.window.vectors for own in state.layers)])
            _, state, _ = decoder(part, state)
        for number, layer in enumerate(decoder.layers):
            # the first is the empty one of the start; the last is still in the short-term memory
            x = torch.cat([layer.memory.stored(part[number]) for part in stored[1:3]], dim=1)
            t = torch.tensor([0.15, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 1.0])
            memory = state.layers[number].memory
            signal = torch.zeros_like(x)
            for place, value in enumerate(t):
                for j in range(8):
                    basis = layer.memory.store.basis
                    center, width = basis.centers[j], basis.widths[j]
                    height = torch.distributions.Normal(center, width).log_prob(value).exp()
                    signal[:, place] += height * memory.coefficients[:, j]
            assert found[number] == pytest.approx(float((signal - x).norm() / x.norm()), rel=1e-4)
    for other in (make_model(), make_model("compressive_transformer")):
        with pytest.raises(ValueError, match="only in a continuous memory that is not sticky"):
            regression_error(other.decoder, tokens, 4)
    with pytest.raises(ValueError, match="nothing of 4 tokens in segments of 4 has left"):
        regression_error(decoder, tokens[:, :4], 4)


@pytest.mark.parametrize("softmax", [None, "10,20"])
def test_accuracy_is_the_share_of_targets_that_are_the_likeliest_word(softmax):
    model = make_model(adaptive_cutoff=softmax)
    pad = model.decoder.dictionary.pad()
    task = SimpleNamespace(target_dictionary=model.decoder.dictionary)
    criterion = CrossEntropyWithKL(task, 0, 0.1, report_accuracy=True)
    tokens = text(2, 6, seed=7)
    with torch.no_grad():
        best = model.get_normalized_probs(model(tokens), log_probs=True).argmax(dim=-1)
        assert not (best == pad).any()
        target = best.clone()
        target[0, 1], target[1, 3] = (best[0, 1] - 3) % 10 + 4, (best[1, 3] - 3) % 10 + 4
        target[:, -1] = pad
        sample = {"net_input": {"src_tokens": tokens}, "target": target, "ntokens": 10}
        _, _, log = criterion(model, {**sample, "nsentences": 2})
        assert int(log["accuracy"]) == 800 and log["accuracy_of"] == 10
        sample["target"] = torch.full_like(target, pad)  # a segment without targets
        _, _, log = criterion(model, {**sample, "ntokens": 0, "nsentences": 2})
        assert int(log["accuracy"]) == 0


def test_layers_without_a_memory():
    model = make_model(ltm_layers="1")
    assert [layer.memory is None for layer in model.decoder.layers] == [True, False]
    _, state = stream(model.decoder, text(1, 20), 5)
    assert state.layers[0].memory == () and state.layers[1].memory.tokens.item() == 9


@pytest.mark.parametrize(
    "kwargs,flag",
    [
        ({"ltm_basis": 7}, "--ltm-basis"),
        ({"ltm_basis": 0}, "transformer_xl_lm"),
        ({"ltm_widths": "0.01,wide"}, "--ltm-widths"),
        ({"ltm_widths": "Auto"}, "--ltm-widths \\(auto, or 0.01,0.05\\)"),
        ({"ltm_tau": 1.5}, "--ltm-tau"),
        ({"ltm_layers": "0,2"}, "--ltm-layers"),
        ({"ltm_widths": "nan,0.1"}, "--ltm-widths"),
        ({"ltm_threshold": -5}, "--ltm-threshold"),
        ({"stm_length": -1}, "--stm-length"),
        ({"sink_tokens": -1}, "--sink-tokens must be at least 0"),
        ({"attention_dropout": 3}, "--attention-dropout"),
        ({"decoder_attention_heads": 3}, "--decoder-attention-heads"),
        ({"adaptive_cutoff": "20,10"}, "--adaptive-cutoff must rise"),
        ({"adaptive_cutoff": "ten"}, "--adaptive-cutoff takes numbers"),
        ({"adaptive_cutoff": "9", "untie_embeddings": True}, "--untie-embeddings is not read with"),
    ],
)
def test_bad_settings_name_their_flag(kwargs, flag):
    with pytest.raises(ValueError, match=flag):
        make_model(**kwargs)


@pytest.mark.parametrize(
    "name,kwargs,flag",
    [
        ("compressive_transformer", {"compression_rate": 0}, "--compression-rate"),
        ("compressive_transformer", {"cmem_length": -1}, "--cmem-length"),
        ("infini_attention", {"infini_update": "cubic"}, "--infini-update must be linear or delta"),
    ],
)
def test_bad_settings_of_the_other_memories_name_their_flag(name, kwargs, flag):
    with pytest.raises(ValueError, match=flag):
        make_model(name, **kwargs)


def test_the_parts_of_a_layer_keep_their_order_by_which_optimizers_number_parameters():
    names = [name.split(".")[0] for name, _ in make_model().decoder.layers[0].named_parameters()]
    assert list(dict.fromkeys(names)) == [
        "attention", "memory", "attention_norm", "inner", "outer", "ffn_norm",
    ]  # fmt: skip


@pytest.mark.parametrize("queries,past", [(5, 0), (64, 7), (150, 70)])
def test_relative_attention_of_a_training_equals_that_of_an_evaluation(queries, past):
    """Output and every gradient, in blocks of queries and in one go, with keys that some rows have
    not."""
    torch.manual_seed(0)
    attention = RelativeAttention(12, 3).double()
    for bias in (attention.content_bias, attention.position_bias):
        torch.nn.init.normal_(bias)
    keys = past + queries
    x = torch.randn(2, keys, 12, dtype=torch.double, requires_grad=True)
    hidden = torch.full((queries, keys), -torch.inf, dtype=torch.double).triu(past + 1)
    hidden = hidden.expand(2, 1, -1, -1).clone()
    hidden[1, :, :, : past // 2] = -torch.inf
    distances = sinusoids(torch.arange(keys - 1, -2, -1), 12).double()
    wanted = torch.randn(2, 3, queries, 4, dtype=torch.double)

    def gradients(attend):
        query, (key, value) = attention.queries(x[:, past:]), attention.project(x)
        out = attend(query, key, value, (distances, hidden))
        names = [name for name, _ in attention.named_parameters() if name != "output.weight"]
        weights = [dict(attention.named_parameters())[name] for name in names]
        return out, torch.autograd.grad((out * wanted).sum(), [x, *weights])

    out, fast = gradients(attention.attend)
    slow_out, slow = gradients(lambda q, k, v, where: attention.weights(q, k, where) @ v)
    with torch.no_grad():
        query, (key, value) = attention.queries(x[:, past:]), attention.project(x)
        evaluated = attention.attend(query, key, value, (distances, hidden))
    assert torch.allclose(out, slow_out) and torch.allclose(out, evaluated)
    for one, two in zip(fast, slow, strict=True):
        assert torch.allclose(one, two)


def test_an_evaluation_keeps_the_keys_and_values_that_it_would_make_again():
    model = make_model("gibbs")
    kept = model.decoder.initial_state(2)
    anew = model.train().decoder.initial_state(2)
    model.eval()
    assert kept.layers[0].window.projected.size(2) and not anew.layers[0].window.projected.size(2)
    one, after = stream(model.decoder, text(2, 30), 5, kept)
    two, _ = stream(model.decoder, text(2, 30), 5, anew)
    assert torch.allclose(one, two, atol=1e-6)
    window = after.layers[0].window
    made = model.decoder.layers[0].attention.key_value(window.vectors)
    assert torch.allclose(window.projected, made, atol=1e-6)
