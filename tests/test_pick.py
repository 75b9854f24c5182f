"""What self-attention has looked at most goes on to the long-term memory, and the host reads it."""

import pytest
import torch
from conftest import load, train
from zoo import HOSTS, make_model, stream, text

from fairseq_inf.memory import Leaving, pick


def test_the_most_looked_at_of_each_row_keep_their_order():
    left = torch.arange(12.0).view(2, 6, 1)
    looked = torch.tensor([[9.0, 1, 5, 2, 7, 3], [0, 0, 4, 1, 0, 2]])
    leaving = Leaving(torch.tensor([5, 4]), torch.tensor([3, 1]), 3)
    first, second = pick(left, looked, leaving).squeeze(2).tolist()
    assert first == [2, 4, 5]  # the first column has not left this row
    assert second[-1] == 8


def test_a_state_that_was_read_without_its_memory_goes_on_with_it():
    decoder = make_model("picked", host="llama").decoder
    decoder.ltm_enabled = False
    _, state = stream(decoder, text(2, 40), 5)
    decoder.ltm_enabled = True
    out, after = stream(decoder, text(2, 20), 5, state)
    assert out.isfinite().all() and after.looked[0].shape[:2] == after.layers[0].window.vectors.shape[:2]


@pytest.mark.parametrize("host", HOSTS)
def test_the_weights_of_an_attention_are_those_that_it_attends_with(host, monkeypatch):
    monkeypatch.setattr("fairseq_inf.modules.attention.LOOKS", 2)
    monkeypatch.setattr("fairseq_inf.modules.attention.FAR", 2)
    decoder = make_model("transformer_xl", host=host).double().decoder
    attention = decoder.layers[0].attention
    _, state = stream(decoder, text(2, 15), 5)
    tokens, found = text(2, 5), {}

    def spy(query, key, value, positions, first=0, drop=True):
        found["one"] = type(attention).attend(attention, query, key, value, positions, first, drop)
        found["weights"] = attention.weights(query, key, positions, 1)
        found["two"] = found["weights"] @ value
        found["looked"] = attention.looked(query, key, positions, None)
        return found["one"]

    attention.attend = spy
    with torch.no_grad():
        decoder(tokens, state)
    assert torch.allclose(found["one"], found["two"], atol=1e-9)
    # one query in two looks, for both; from less than two tokens away that counts a thousandth, and
    # its weight a tenth of it
    weights = found["weights"].sum(dim=1)  # B x T x P
    past, looked = weights.size(2) - 5, torch.zeros(*weights[:, 0].shape, 2)
    for query in range(0, 5, 2):
        for key in range(past + query + 1):
            far = past + query - key >= 2
            looked[:, key, 0] += 2 * (1.0 if far else 1e-4) * weights[:, query, key]
            looked[:, key, 1] += 2 * (1.0 if far else 1e-3)
    assert torch.allclose(found["looked"], looked, atol=1e-6)


@pytest.mark.parametrize("memory", ["picked", "slots_of_signal"])
def test_a_memory_that_the_host_reads_serves_without_training(memory):
    """As it is built: further keys of one softmax, with the host's own maps."""
    own = {"ltm_start": "host", "ltm_rank": 0, "ltm_pick": 1, "ltm_schedule": "uniform"}
    own |= {"cmem_length": 40, "ltm_points": 34, "ltm_basis": 34, "ltm_ridge": 1e-9}
    kind = make_model(memory, host="llama", sharp=False)
    fields = {name for name in own if hasattr(type(kind).config, name)}
    own = {name: own[name] for name in fields}
    settings = {"host": "llama", "sharp": False, "sink_tokens": 0, "slot_spacing": 1.0}
    model = make_model(memory, **settings, **own)
    for x in model.parameters():
        torch.nn.init.normal_(x, std=0.3)
    assert not model.memory_state_dict()
    plain = make_model("transformer_xl", **{**settings, "stm_length": 40})
    plain.load_state_dict(model.state_dict())
    tokens = text(1, 45)
    if memory == "picked":  # all that has left is a slot, where it would stand: nothing is lost
        one, other = (stream(x.double().decoder, tokens, 5)[0] for x in (model, plain))
        assert torch.allclose(one, other, atol=1e-9)
    else:
        short = make_model("transformer_xl", **settings)
        short.load_state_dict(model.state_dict())
        outs = [stream(x.double().decoder, tokens, 5)[0] for x in (model, plain, short)]
        assert (outs[0] - outs[2]).abs().max() > 1e-3


def test_flags_that_need_slots_say_so():
    for own in ({"ltm_start": "host"}, {"ltm_rank": 4}):
        with pytest.raises(ValueError, match="needs a memory with slots, which the host's own"):
            make_model("gibbs", host="llama", **own)
    with pytest.raises(ValueError, match="--ltm-sticky is not for points that the host's"):
        make_model("slots_of_signal", ltm_sticky=True)
    with pytest.raises(ValueError, match="--ltm-pick must be at least 1, got 0"):
        make_model(ltm_pick=0)


@pytest.mark.slow
def test_a_correction_of_the_slots_is_all_that_a_frozen_host_learns(data_bin, tmp_path):
    sizes = "--decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 "
    sizes += "--decoder-attention-heads 4 --decoder-key-heads 2 --stm-length 12 --sink-tokens 2 "
    sizes += "--cmem-length 8 --compression-rate 1 --compression mean --ltm-pick 2 --ltm-rank 2 "
    sizes += "--ltm-start host --slot-spacing 2 --freeze-host --checkpoint-activations"
    model = ["--arch", "compressive_transformer_lm_llama", *sizes.split()]
    saved = []
    for updates in (1, 20):
        folder = tmp_path / str(updates)
        assert "done training" in train(data_bin, folder, "--max-update", updates, model=model)
        saved.append(load(folder / "checkpoint_last.pt")["model"])
    changed = {name for name in saved[0] if not torch.equal(saved[0][name], saved[1][name])}
    wanted = {name for name in saved[0] if ".memory.correction." in name}
    assert changed == wanted and wanted
