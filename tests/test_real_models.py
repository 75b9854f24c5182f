"""SmolLM2 and stories15M themselves, beside transformers: set FAIRSEQ_INF_MODELS to the folder
`models` that examples/pretrained/fetch.sh has made."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_pretrained import convert
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from zoo import stream

from fairseq_inf.models import TransformerXLLM

MODELS = {"smollm2": ("smollm2.gguf", 256), "stories15m": ("stories15m", 64)}  # L = S
SINKS = 4

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=MODELS)
def real(request, real_data, tmp_path_factory):
    """A model of ours with a short-term memory of `stm` and sinks, theirs, and eos and a text in
    the tokens of each."""
    folder = Path(os.environ.get("FAIRSEQ_INF_MODELS", "no such folder"))
    name, length = MODELS[request.param]
    if not (folder / name).exists():
        pytest.skip(f"set FAIRSEQ_INF_MODELS to a folder with {name}")
    imported = tmp_path_factory.mktemp("imported") / "model"
    convert(folder / name, imported)

    def make(stm=0, sinks=0):
        settings = {"stm_length": stm, "sink_tokens": sinks}
        return TransformerXLLM.from_pretrained(str(imported), "checkpoint.pt", ".", **settings)

    if (folder / name).is_dir():
        theirs = LlamaForCausalLM.from_pretrained(folder / name)
    else:
        theirs = read_by_transformers(folder / name)
    hub = make()
    words, eos = hub.dictionary, theirs.config.eos_token_id
    places = torch.tensor([words.index(str(i)) for i in range(theirs.config.vocab_size)])
    places[eos if request.param == "smollm2" else 1] = words.eos()
    book = sorted((real_data / "pg19" / "validation").glob("*.txt"))[0].read_text()
    ours = hub.tokens_of(book[20_000:40_000])[: max(512, 5 * length)]
    ours = torch.cat([torch.tensor([words.eos()]), ours])[None]
    token = torch.full((len(words),), -1).index_put((places,), torch.arange(len(places)))
    return SimpleNamespace(
        make=make, theirs=theirs.eval(), length=length, ours=ours, text=token[ours], places=places
    )


def read_by_transformers(path):
    """A .gguf file, as from_pretrained does it, but for accelerate."""
    theirs = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(path)["config"]))
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=theirs)["tensors"]
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}  # which is the embedding
    return theirs.float()


def perplexity(logits, tokens, skipped=0):
    """Of all but the first `skipped` of the tokens that the logits are for."""
    loss = torch.nn.functional.cross_entropy
    return float(loss(logits[0, skipped:-1], tokens[0, skipped + 1 :]).exp())


@torch.no_grad()
def test_logits_are_those_of_transformers(real):
    """Of 512 tokens, as many at a time as the model has positions for."""
    decoder = real.make().model.decoder
    at_once = min(512, decoder.num_positions)
    expected = [real.theirs(x).logits for x in real.text[:, :512].split(at_once, dim=1)]
    found = [
        decoder(x, decoder.initial_state(1))[0][..., real.places]
        for x in real.ours[:, :512].split(at_once, dim=1)
    ]
    expected, found = torch.cat(expected, dim=1), torch.cat(found, dim=1)
    assert expected.size(1) == 512
    assert (found - expected).norm() < 1e-3 * expected.norm()
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()


@torch.no_grad()
def test_perplexities_are_those_of_transformers(real):
    """By segments alone, with one more before each, and as a stream with sinks."""
    length, text = real.length, real.text
    theirs, ours = {}, {}
    parts = text[:, :-1].split(length, dim=1)
    theirs["alone"] = torch.cat([real.theirs(x).logits for x in parts], dim=1)
    windows = [torch.cat(pair, dim=1) for pair in zip(parts, parts[1:], strict=False)]
    before = [real.theirs(parts[0]).logits, *(real.theirs(x).logits[:, length:] for x in windows)]
    theirs["one before"] = torch.cat(before, dim=1)
    theirs["stream"] = streaming(real.theirs, text[:, :-1], length)

    plain = real.make().model.decoder
    state, tokens = plain.initial_state(1), real.ours[:, :-1]
    parts = tokens.split(length, dim=1)
    ours["alone"] = torch.cat([plain(x, state)[0] for x in parts], dim=1)
    windows = [torch.cat(pair, dim=1) for pair in zip(parts, parts[1:], strict=False)]
    before = [plain(parts[0], state)[0], *(plain(x, state)[0][:, length:] for x in windows)]
    ours["one before"] = torch.cat(before, dim=1)
    ours["stream"] = stream(real.make(length, SINKS).model.decoder, tokens, length)[0]
    for name, logits in theirs.items():
        found = torch.cat([ours[name][..., real.places], logits[:, :1]], dim=1)
        expected = torch.cat([logits, logits[:, :1]], dim=1)
        one, other = perplexity(found, text), perplexity(expected, text)
        print(f"{name}: ours {one:.4f}, theirs {other:.4f}")
        assert abs(one - other) < 1e-3 * other, name


def streaming(model, text, length):
    """Segments over a cache of the first tokens and the last segment, whose keys are turned back to
    their places in the cache (Xiao et al., 2024)."""
    out, kept = [], None
    for part in text.split(length, dim=1):
        past = 0 if kept is None else kept[0][0].size(2)
        cache = DynamicCache() if kept is None else DynamicCache.from_legacy_cache(kept)
        # in front of the first segment there is as much room as later
        first = SINKS + length
        places = torch.arange(first, first + part.size(1))[None]
        done = model(part, past_key_values=cache, position_ids=places, use_cache=True)
        out.append(done.logits)
        kept = []
        for keys, values in done.past_key_values.to_legacy_cache():
            last, first_tokens = _turned(model, keys[:, :, -length:], -length), keys[:, :, :0]
            if past:
                # when they have just left the last segment, they still have its places
                back = -SINKS if past == length else 0
                first_tokens = _turned(model, keys[:, :, :SINKS], back)
            values = torch.cat(
                [values[:, :, : first_tokens.size(2)], values[:, :, -length:]], dim=2
            )
            kept.append((torch.cat([first_tokens, last], dim=2), values))
    return torch.cat(out, dim=1)


def _turned(model, keys, by):
    cos, sin = model.model.rotary_emb(keys, torch.tensor([[by]]))
    return apply_rotary_pos_emb(keys, keys, cos, sin)[1]
