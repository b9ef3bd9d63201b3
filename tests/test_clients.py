"""Other people's programs with a pair where they expect a model: the same result as with the target alone.

Each test is a row of the page "Works with": its docstring says what is checked. `make clients-check` installs the programs,
runs this file and writes the page.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    pipeline,
)

from assisted import AssistedModelForCausalLM, zoo

pytestmark = pytest.mark.clients

PROMPTS = ["def mean(values):\n", "class Queue:\n    def push(self, item):\n", "import os\n\n"]
CALL = {"max_new_tokens": 32, "do_sample": False}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}}}


def client(package: str) -> pytest.MarkDecorator:
    """Which program a test is about, for the page."""
    return pytest.mark.client(package)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    loaded = AutoTokenizer.from_pretrained(zoo.folder("target"), padding_side="left")
    loaded.pad_token = loaded.pad_token or loaded.eos_token
    return loaded


@pytest.fixture
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(zoo.folder("target"))


@pytest.fixture
def pair() -> AssistedModelForCausalLM:
    return AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:draft", draft_length=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved pair."""
    path = tmp_path_factory.mktemp("pair")
    AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:draft", draft_length=4).save_pretrained(path)
    return path


def batch(tokenizer: Any, prompts: list[str] = PROMPTS) -> dict[str, torch.Tensor]:
    return dict(tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False))


# --- structured output: processors that count the tokens they have seen


def check_processor(make: Any, pair: Any, target: Any, inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    """A processor of its own for each call. Returns the text."""
    plain = target.generate(**inputs, **CALL, logits_processor=LogitsProcessorList([make()])).tolist()
    assert pair.generate(**inputs, **CALL, logits_processor=LogitsProcessorList([make()])).tolist() == plain
    assert pair.report.drafted > 0
    return plain


@client("xgrammar")
def test_xgrammar(pair: Any, target: Any, tokenizer: Any) -> None:
    """a JSON schema as a logits processor, one prompt and batches"""
    xgrammar = pytest.importorskip("xgrammar")
    hf = pytest.importorskip("xgrammar.contrib.hf")
    information = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=target.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(information).compile_json_schema(json.dumps(SCHEMA))
    for prompts in (PROMPTS[:1], PROMPTS):
        inputs = batch(tokenizer, prompts)
        text = check_processor(lambda: hf.LogitsProcessor(grammar), pair, target, inputs)
        assert tokenizer.decode(text[0][inputs["input_ids"].shape[1] :]).startswith("{")


@client("llguidance")
def test_llguidance(pair: Any, target: Any, tokenizer: Any) -> None:
    """a JSON schema through `LLMatcher` in a logits processor"""
    llguidance = pytest.importorskip("llguidance")
    hf, masks = pytest.importorskip("llguidance.hf"), pytest.importorskip("llguidance.torch")
    size = target.config.vocab_size
    tokens = hf.from_tokenizer(tokenizer, n_vocab=size)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))

    class Guide(LogitsProcessor):
        def __init__(self) -> None:
            self.matcher = llguidance.LLMatcher(tokens, grammar)
            self.started = False

        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            if self.started:
                assert self.matcher.consume_token(int(input_ids[0, -1]))
            self.started = True
            mask = masks.allocate_token_bitmask(1, size)
            masks.fill_next_token_bitmask(self.matcher, mask)
            scores = scores.clone()
            masks.apply_token_bitmask_inplace(scores, mask)
            return scores

    inputs = batch(tokenizer, PROMPTS[:1])
    text = check_processor(Guide, pair, target, inputs)
    assert tokenizer.decode(text[0][inputs["input_ids"].shape[1] :]).lstrip().startswith("{")


@client("outlines")
def test_outlines(pair: Any, target: Any, tokenizer: Any) -> None:
    """`outlines.from_transformers`, text of a regular expression"""
    outlines = pytest.importorskip("outlines")
    expression = outlines.types.Regex(r"    return [a-z]{3,9}\([a-z]{3,9}\)\n")
    plain = outlines.from_transformers(target, tokenizer)(PROMPTS[0], expression, **CALL)
    assert outlines.from_transformers(pair, tokenizer)(PROMPTS[0], expression, **CALL) == plain
    assert plain.startswith("    return ")
    assert pair.report.drafted > 0


# --- evaluation and applications


@client("lm-eval")
def test_lm_eval(pair: Any, target: Any, tokenizer: Any) -> None:
    """`HFLM(pretrained=pair)`: generate_until and loglikelihood, batches of two"""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    until = {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False}
    asked: dict[str, list[Any]] = {
        "generate_until": [(text, dict(until)) for text in PROMPTS],
        "loglikelihood": [(text, "    return sum(values)\n") for text in PROMPTS],
    }
    results = []
    for model in (target, pair):
        harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
        results.append(
            [
                getattr(harness, kind)(
                    [Instance(request_type=kind, doc={}, arguments=given, idx=0) for given in arguments]
                )
                for kind, arguments in asked.items()
            ]
        )
    (texts, scores), (our_texts, our_scores) = results
    assert our_texts == texts
    assert our_scores == scores
    assert pair.totals.drafted > 0


@client("langchain-huggingface")
def test_langchain(pair: Any, target: Any, tokenizer: Any) -> None:
    """`HuggingFacePipeline`: invoke and stream"""
    langchain = pytest.importorskip("langchain_huggingface")
    written = []
    for model in (target, pair):
        made = pipeline("text-generation", model=model, tokenizer=tokenizer, **CALL)
        chain = langchain.HuggingFacePipeline(pipeline=made)
        written.append([chain.invoke(PROMPTS[0]), "".join(chain.stream(PROMPTS[1]))])
    assert written[0] == written[1]
    assert pair.report.drafted > 0


@client("smolagents")
def test_smolagents(folder: Path) -> None:
    """`TransformersModel(model_id=FOLDER)`: a message, answered at once and streamed"""
    smolagents = pytest.importorskip("smolagents")
    message = smolagents.ChatMessage(role="user", content=[{"type": "text", "text": "Write a mean function"}])
    written = []
    for path in (zoo.folder("target"), folder):
        model = smolagents.TransformersModel(model_id=str(path), max_new_tokens=32, do_sample=False)
        streamed = "".join(delta.content or "" for delta in model.generate_stream([message]))
        written.append([model.generate([message]).content, streamed])
    assert written[0] == written[1]
    assert isinstance(model.model, AssistedModelForCausalLM) and model.model.totals.drafted > 0


# --- PEFT and training


def text_of(model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> list[list[int]]:
    return model.generate(**inputs, **CALL, **kwargs).tolist()


@pytest.fixture
def adapter(target: Any, tmp_path: Path) -> Path:
    """A folder with a random adapter for the target."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(zoo.folder("target")), config).save_pretrained(tmp_path)
    return tmp_path


@client("peft")
def test_peft_around_a_pair(pair: Any, target: Any, tokenizer: Any, adapter: Path) -> None:
    """`PeftModel.from_pretrained(pair, FOLDER)`, and the adapter saved again"""
    peft = pytest.importorskip("peft")
    inputs = batch(tokenizer)
    plain = text_of(peft.PeftModel.from_pretrained(target, adapter).eval(), inputs)
    assert plain != text_of(pair, inputs)
    tuned = peft.PeftModel.from_pretrained(pair, adapter).eval()
    assert text_of(tuned, inputs) == plain
    assert pair.report.drafted > 0
    assert not any("lora" in name for module in pair.drafter.modules for name, _ in module.named_modules())
    tuned.save_pretrained(adapter / "again")
    saved = json.loads((adapter / "again" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == pair.target.config._name_or_path


@client("peft")
def test_peft_in_a_pair(pair: Any, target: Any, tokenizer: Any, adapter: Path) -> None:
    """`pair.load_adapter`, `set_adapter`, `disable_adapters`, `enable_adapters`"""
    inputs = batch(tokenizer)
    without = text_of(target, inputs)
    for model in (target, pair):
        model.load_adapter(str(adapter), adapter_name="one")
    assert pair.active_adapters() == target.active_adapters() == ["one"]
    assert text_of(pair, inputs) == text_of(target, inputs) != without
    pair.disable_adapters()
    assert text_of(pair, inputs) == without
    pair.enable_adapters()
    pair.set_adapter("one")
    assert text_of(pair, inputs) == text_of(target, inputs)


@client("peft")
def test_peft_mixed_batches(pair: Any, target: Any, tokenizer: Any, adapter: Path) -> None:
    """`adapter_names=[...]`: an adapter for each row, decoded without drafts, with a warning"""
    peft = pytest.importorskip("peft")
    inputs, names = batch(tokenizer), ["default", "__base__", "default"]
    plain = text_of(peft.PeftModel.from_pretrained(target, adapter).eval(), inputs, adapter_names=names)
    with pytest.warns(UserWarning, match="adapter_names"):
        assert text_of(peft.PeftModel.from_pretrained(pair, adapter).eval(), inputs, adapter_names=names) == plain
    other = AutoModelForCausalLM.from_pretrained(zoo.folder("target"))
    around = AssistedModelForCausalLM.from_models(
        peft.PeftModel.from_pretrained(other, adapter).eval(), draft="zoo:draft"
    )
    with pytest.warns(UserWarning, match="adapter_names"):
        assert text_of(around, inputs, adapter_names=names) == plain


@client("peft")
def test_peft_learned_prompts(pair: Any, target: Any, tokenizer: Any) -> None:
    """`get_peft_model(pair, PromptTuningConfig(...))`, decoded without drafts, with a warning"""
    peft = pytest.importorskip("peft")
    inputs = batch(tokenizer, PROMPTS[:1])
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    texts = []
    for model in (target, pair):
        torch.manual_seed(0)
        texts.append(text_of(peft.get_peft_model(model, config).eval(), inputs))
    assert texts[0] == texts[1]


@client("trl")
def test_grpo(tokenizer: Any, tmp_path: Path) -> None:
    """`GRPOTrainer`: greedy rollouts and rewards of three steps, while the weights change"""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": text} for text in PROMPTS * 2])
    rewards: dict[str, list[Any]] = {}

    def run(name: str, model: Any) -> Any:
        seen = rewards[name] = []

        def reward(completions: list[str], **kwargs: Any) -> list[float]:
            seen.append(list(completions))
            return [float(len(text) + number) for number, text in enumerate(completions)]

        arguments = trl.GRPOConfig(
            output_dir=str(tmp_path / name),
            max_steps=3,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=24,
            generation_kwargs={"do_sample": False},
            learning_rate=0.02,
            weight_decay=1.0,  # the rows of a group are alike, and have no gradient: this changes the weights
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        trainer = trl.GRPOTrainer(
            model=model, reward_funcs=reward, args=arguments, train_dataset=rows, processing_class=tokenizer
        )
        trainer.train()
        return trainer

    target = AutoModelForCausalLM.from_pretrained(zoo.folder("target"))
    before = target.lm_head.weight.detach().clone()
    run("plain", target)
    assert not torch.equal(target.lm_head.weight, before)
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:draft", draft_length=4)
    run("pair", pair)
    assert rewards["pair"] == rewards["plain"]
    assert pair.totals.drafted > 0


# --- the server of transformers


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[str]:
    """The address of `transformers serve FOLDER`, in a process that was told nothing of assisted."""
    for module in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(module)
    command = shutil.which("transformers", path=str(Path(sys.executable).parent))
    assert command is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    arguments = ["serve", str(folder), "--trust-remote-code", "--host", "127.0.0.1", "--port", str(port)]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([command, *arguments], env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{port}"
        until = time.monotonic() + 120
        while True:
            assert process.poll() is None and time.monotonic() < until, (tmp_path / "log").read_text()
            try:
                urllib.request.urlopen(f"{address}/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


@client("transformers serve")
def test_serve(server: str, folder: Path, tokenizer: Any, target: Any) -> None:
    """`transformers serve FOLDER --trust-remote-code`: chat, streamed and not, two clients at once"""
    import openai

    questions = ["Write a mean function", "Write a queue"]
    expected = []
    for question in questions:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = target.generate(**inputs, **CALL)[0, inputs["input_ids"].shape[1] :]
        expected.append(tokenizer.decode(output, skip_special_tokens=True))
    answers: dict[tuple[int, bool], str] = {}

    def ask(number: int) -> None:
        api = openai.OpenAI(base_url=f"{server}/v1", api_key="none", timeout=60, max_retries=0)
        for stream in (True, False):
            answer: Any = api.chat.completions.create(
                model=str(folder),
                messages=[{"role": "user", "content": questions[number]}],
                max_tokens=CALL["max_new_tokens"],
                temperature=0,
                stream=stream,
            )
            if stream:
                pieces = [chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices]
                assert len(pieces) > 4, "it comes in pieces"
                answers[number, stream] = "".join(pieces)
            else:
                answers[number, stream] = answer.choices[0].message.content

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert answers == {(number, stream): expected[number] for number in range(2) for stream in (True, False)}


# --- the server of this package


@client("openai")
def test_own_server(pair: Any, target: Any, tokenizer: Any) -> None:
    """`assisted serve`: models, chat streamed and not, an answer as the next turn, JSON by a schema, errors"""
    openai, pydantic = pytest.importorskip("openai"), pytest.importorskip("pydantic")
    pytest.importorskip("llguidance")
    from assisted.serving import Server

    class Item(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=4)
        size: int = pydantic.Field(ge=0, le=99)

    messages = [{"role": "user", "content": [{"type": "text", "text": "Write a mean function"}]}]
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Write a mean function"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = inputs["input_ids"]
    expected = tokenizer.decode(target.generate(**inputs, **CALL)[0, ids.shape[1] :], skip_special_tokens=True)
    with Server({"zoo:draft": pair}, "target", ("127.0.0.1", 0), key="secret") as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        api = openai.OpenAI(
            base_url=f"http://127.0.0.1:{made.server_port}/v1", api_key="secret", timeout=60, max_retries=0
        )
        chats: Any = api.chat.completions
        assert [model.id for model in api.models.list()] == ["target"]
        call = {"model": "target", "max_tokens": CALL["max_new_tokens"], "temperature": 0, "parallel_tool_calls": True}
        answer = chats.create(messages=messages, **call).choices[0].message
        assert answer.content == expected
        chunks = list(chats.create(messages=messages, stream=True, stream_options={"include_usage": True}, **call))
        assert "".join(one.choices[0].delta.content for one in chunks if one.choices) == expected
        assert [one.usage.total_tokens for one in chunks if one.usage] == [ids.shape[1] + CALL["max_new_tokens"]]
        again = chats.create(messages=[*messages, answer.model_dump(), messages[0]], n=2, **call)
        assert len(again.choices) == 2
        parsed = chats.parse(messages=messages, response_format=Item, **(call | {"max_tokens": 400}))
        assert isinstance(parsed.choices[0].message.parsed, Item)
        with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
            chats.create(messages=messages, frequency_penalty=1, **call)
        with pytest.raises(openai.AuthenticationError):
            api.with_options(api_key="other").models.list()
        made.shutdown()


# --- the apps of the page "In an app"


def app_of(title: str) -> dict[str, Any]:
    """What the page's first program defines, and the one below a title."""
    page = Path(__file__).parent.parent / "docs" / "integrations" / "apps.md"
    head, _, rest = page.read_text(encoding="utf-8").partition(f"\n## {title}")
    found: dict[str, Any] = {}
    for text in (head, rest):
        exec(re.findall(r"```python.*?\n(.*?)```", text, re.S)[0], found)
    return found


def alone(model: Any, tokenizer: Any, prompt: str, new: int) -> str:
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=new, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(output, skip_special_tokens=True)


@client("fastapi")
def test_fastapi(target: Any, tokenizer: Any) -> None:
    """the app of [In an app](apps.md): streams to two clients, and a call that ends because its client leaves"""
    pytest.importorskip("fastapi")
    uvicorn = pytest.importorskip("uvicorn")
    found = app_of("FastAPI")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        server = uvicorn.Server(uvicorn.Config(found["app"], log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()

        def ask(prompt: str, new: int) -> Any:
            body = json.dumps({"prompt": prompt, "max_new_tokens": new}).encode()
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/write"
            return urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}))

        started, texts = threading.Event(), {}
        found["pair"].watch = lambda round: started.set()
        leaving = ask("class A:\n", 512)  # the others wait for it
        assert leaving.read(1) and started.wait(60)
        leaving.close()

        def read(prompt: str) -> None:
            texts[prompt] = ask(prompt, 32).read().decode()

        threads = [threading.Thread(target=read, args=(prompt,)) for prompt in PROMPTS[:2]]
        for one in threads:
            one.start()
        for one in threads:
            one.join(90)
        server.should_exit = True
        thread.join(90)
    assert texts == {prompt: alone(target, tokenizer, prompt, 32) for prompt in PROMPTS[:2]}
    assert found["pair"].totals.new_tokens < 256  # of 576 that were asked for


@client("gradio")
def test_gradio(target: Any, tokenizer: Any) -> None:
    """the chat of [In an app](apps.md), asked through its API: two turns"""
    pytest.importorskip("gradio")
    gradio_client = pytest.importorskip("gradio_client")
    found = app_of("A chat in Gradio")
    found["chat"].launch(prevent_thread_lock=True, quiet=True)
    try:
        chat = gradio_client.Client(found["chat"].local_url, verbose=False)
        turns = [chat.predict(text, api_name="/reply") for text in PROMPTS[:2]]
    finally:
        found["chat"].close()
    assert turns[0] == alone(target, tokenizer, PROMPTS[0], 64) and len(turns[1]) > 0
    assert found["pair"].report.cached_tokens > 0
