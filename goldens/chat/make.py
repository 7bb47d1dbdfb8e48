"""Write the goldens of chat templates: what transformers renders and tokenizes, and what TRL masks.

Run by hand, from this folder, when a template, a conversation or an expression changes:

    pip install transformers==5.22.2 tokenizers==0.23.3 trl==1.16.0 jinja2
    python make.py
    python make.py --originals OUT [MORE]

The first command writes tokenizer/ (a small byte-level BPE) and cases.json:

    templates[name]    a list, one entry per conversation and value of `prompt` (add_generation_prompt):
        text, ids      as apply_chat_template returns them; or error, its message
        mask           assistant_masks as [start, end) ranges of tokens; for prompt = false only
    pairs[name]        conversations split before their last message, as in TRL's SFTTrainer
        ids; completion, both: ranges of tokens whose label is not -100, with completion_only_loss alone and
                       with assistant_only_loss too; mismatch: whether the prompt's tokens are not a prefix
    expressions        one entry per line of expressions.json: text, or error

The second command renders the templates of published models, which are other people's work and not in this repository:
every *.jinja that TRL ships, and those in the folder MORE. It writes OUT/NAME.jinja and OUT/NAME.json, in the format of
a template above, with `trl`: the mask of the training template that TRL uses instead, where the tokens are the same.
"""

import argparse
import datetime
import hashlib
import json
import pathlib
import re

import transformers.utils.chat_template_utils as engine
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import get_training_chat_template
from trl.data_utils import common_prefix_length

HERE = pathlib.Path(__file__).resolve().parent
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|stop|>", "<think>"]
TOOLS = {
    "weather": [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Says what the sky is like; \"quotes\" & <tags> stay.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string", "description": "Größe egal"},
                        "days": {"type": "integer", "minimum": 0.5},
                    },
                    "required": ["city"],
                },
                "return": {"type": "string"},
            },
        },
        {"type": "function", "function": {"name": "time", "description": "", "parameters": {}}},
    ]
}
VARIABLES = {
    "items": [1, 2, 3],
    "text": "héllo",
    "object": {"b": 1, "a": "ü", "c": None},
    "nested": {"list": [1.0, {"deep": {"key": "v"}}], "empty": [], "map": {}, "yes": True},
    "people": [{"name": "Ada", "age": 36}, {"name": "Bo", "age": 2}, {"name": "Cy"}],
}


class Fixed(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)


engine.datetime = Fixed


def conversations():
    chats = json.loads((HERE / "conversations.json").read_text())
    for chat in chats:
        chat["tools"] = TOOLS.get(chat.get("tools"))
        chat.setdefault("kwargs", {})
    return chats


def tokenizer(chats):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    words = [str(m.get("content")) for chat in chats for m in chat["messages"]] + [json.dumps(TOOLS)]
    bpe.train_from_iterator([w for w in words if w.isascii()] * 2, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(HERE / "tokenizer")
    (HERE / "tokenizer" / "special_tokens_map.json").unlink(missing_ok=True)
    return fast


def ranges(mask):
    out, start = [], None
    for at, bit in enumerate(list(mask) + [0]):
        if bit and start is None:
            start = at
        elif not bit and start is not None:
            out.append([start, at])
            start = None
    return out


def apply(fast, template, chat, messages=None, **options):
    return fast.apply_chat_template(
        messages or chat["messages"], tools=chat["tools"], chat_template=template, tokenize=True, return_dict=True,
        **chat["kwargs"], **options)


def case(fast, template, chat, prompt):
    out = {"chat": chat["name"], "prompt": prompt}
    tagged = not prompt and re.search(r"\{%[-+]?\s*generation", template) is not None
    try:
        out["text"] = fast.apply_chat_template(
            chat["messages"], tools=chat["tools"], chat_template=template, tokenize=False,
            add_generation_prompt=prompt, **chat["kwargs"])
        found = apply(fast, template, chat, add_generation_prompt=prompt, return_assistant_tokens_mask=tagged)
    except Exception as error:
        return {"chat": chat["name"], "prompt": prompt, "error": f"{type(error).__name__}: {error}"[:160]}
    out["ids"] = found["input_ids"]
    if tagged:
        out["mask"] = ranges(found["assistant_masks"])
    return out


def pair(fast, template, chat):
    """Tokenize a conversation with all but the last message as its prompt, as TRL's tokenize_fn does."""
    if len(chat["messages"]) < 2 or chat["messages"][-1]["role"] != "assistant":
        return None
    try:
        prompt = apply(fast, template, chat, chat["messages"][:-1], add_generation_prompt=True)["input_ids"]
        whole = apply(fast, template, chat, return_assistant_tokens_mask=True)
    except Exception:
        return None
    shared = common_prefix_length(prompt, whole["input_ids"])
    completion = [int(at >= shared) for at in range(len(whole["input_ids"]))]
    both = [a * b for a, b in zip(completion, whole["assistant_masks"])]
    return {"chat": chat["name"], "ids": whole["input_ids"], "completion": ranges(completion), "both": ranges(both),
            "mismatch": shared < len(prompt)}


def expression(fast, text):
    try:
        return {"text": fast.apply_chat_template(
            [{"role": "user", "content": "hi"}], chat_template=text, tokenize=False, **VARIABLES)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:160]}


def dump(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=None, separators=(",", ":")).replace(
        '{"chat"', '\n{"chat"').replace('{"template"', '\n{"template"') + "\n")


def own(fast, chats):
    cases = {"variables": VARIABLES, "tools": TOOLS, "templates": {}, "pairs": {}, "expressions": []}
    for path in sorted((HERE / "templates").glob("*.jinja")):
        template = path.read_text()
        cases["templates"][path.stem] = [case(fast, template, chat, p) for chat in chats for p in (False, True)]
        cases["pairs"][path.stem] = [found for chat in chats if (found := pair(fast, template, chat))]
    for text in json.loads((HERE / "expressions.json").read_text()):
        cases["expressions"].append({"template": text, **expression(fast, text)})
    dump(HERE / "cases.json", cases)


def originals(fast, chats, out, more):
    out.mkdir(parents=True, exist_ok=True)
    paths = sorted((pathlib.Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    paths += sorted(more.glob("*.jinja")) if more else []
    for path in paths:
        template = path.read_text()
        fast.chat_template = template
        try:
            training = get_training_chat_template(fast)
        except ValueError:
            training = None
        cases = []
        for chat in chats:
            for prompt in (False, True):
                found = case(fast, template, chat, prompt)
                if training and not prompt and "ids" in found:
                    other = case(fast, training, chat, False)
                    if other.get("ids") == found["ids"]:
                        found["trl"] = other["mask"]
                cases.append(found)
        (out / path.name).write_text(template)
        dump(out / f"{path.stem}.json", {"templates": {path.stem: cases}})
        print(hashlib.sha256(template.encode()).hexdigest(), path.stem)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--originals", nargs="+", type=pathlib.Path)
    args = parser.parse_args()
    chats = conversations()
    fast = tokenizer(chats)
    if args.originals:
        originals(fast, chats, args.originals[0], args.originals[1] if len(args.originals) > 1 else None)
    else:
        own(fast, chats)


main()
