"""The recipe: one YAML file describes a run from prompts to report.

    recipe = load_recipe("recipes/debug/eagle3.yaml", ["train.max_steps=20", "head.unroll_steps=2"])

Strict: an unknown key fails naming the closest known one; contradictory keys fail naming both and their values.
Defaults live only in the models below (and, for `head:` and `objective:`, in `recipes/head_blocks.py` and `recipes/objective_blocks.py`).
"""

from __future__ import annotations

import contextlib
import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt, SerializeAsAny, ValidationError, model_validator

from recipes.blocks import Block, Share
from recipes.errors import RecipeError
from recipes.head_blocks import HeadBlock
from recipes.methods import METHODS

T = TypeVar("T")
Several = Annotated[list[T], Field(min_length=1)]  # one at least


class Target(Block):
    """The model to be sped up."""

    path: str  # `embedded:smollm2-135m`, `tiny:llama` (random, made on the spot), a local folder, or a HF id
    revision: str | None = None  # branch, tag or commit of a HF id (other paths refuse one); None: the hub's default branch
    # of the target's weights, and of the export; what vLLM, the reference decoder and a GPU compute in. On a CPU, extraction and online
    # training load the weights in it and compute in float32 (products: features.precision)
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    # attention of the target wherever transformers runs it (the reference decoder takes sdpa for flash_attention_2); vLLM chooses its own
    attn: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    tp: PositiveInt = 1  # GPUs over which vLLM splits the target (answers, evaluation); extraction and training hold it whole on each GPU
    trust_remote_code: bool = False  # let transformers and vLLM run the Python files of the model's folder; read them first


class Regenerate(Block):
    """Let the target write the answers (on-policy data; METHODS §15.9)."""

    engine: Literal["vllm", "hf"] = "vllm"  # hf: transformers' generate, where vLLM is not installed
    temperature: float = Field(default=0.0, ge=0)  # of sampled answers; 0: greedy. Take what you serve with
    greedy_share: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of rows decoded greedily whatever the temperature
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # sampled answers: only the most likely tokens that make up this share; 1: all
    max_new_tokens: PositiveInt = 512  # of one answer; a prompt that leaves less room in the target's context is dropped and counted
    concurrency: PositiveInt = 64  # requests in flight (vllm), prompts of a batch (hf)
    every_turn: bool = False  # multi-turn rows: answer each user turn in order, not only the last
    seed: int = 0  # decides which rows are greedy (`greedy_share`) and what is sampled


class Data(Block):
    """Conversations, how they become tokens, and what is supervised."""

    # JSONL (.gz), JSON or Parquet files, folders of them or of `save_to_disk`, HF ids `owner/name[:split]`, or `embedded:NAME`
    prompts: Several[str]
    regenerate: Regenerate | None = None  # None: the answers in the files are used as they are
    max_length: PositiveInt = 2048  # tokens; longer rows are cut
    # assistant: every answer of a row; last_assistant: its last one (in rows that are rendered text: every one); all: prompts too, and any
    # document that a row gives as {"text": "…"}
    supervise: Literal["assistant", "last_assistant", "all"] = "assistant"
    chat_template: str | None = None  # a Jinja file that replaces the tokenizer's own template
    # variables that the chat template reads, for instance {enable_thinking: false}; used for rows, answers and the prompts of eval alike:
    # give what you serve with
    template_kwargs: dict[str, bool | int | float | str] = {}
    holdout: Share = 0.05  # share of rows kept for validation, chosen by a hash of the row's text
    max_rows: PositiveInt | None = None  # the first so many usable rows of all sources together; None: all
    seed: int = 0  # of the hash that chooses the held-out rows


class Features(Block):
    """The store of the target's hidden states between data_prep and train (DESIGN §4)."""

    dir: str  # the store's folder, with the answers of data.regenerate; one target, one set of data settings each
    layers: Literal["auto"] | list[int] = "auto"  # auto: what the head reads; a list may hold more
    codec: Literal["f32", "bf16"] = "bf16"  # of the stored layers; last_hidden is kept as the target computed it. f32 takes twice the disk
    # of the target's products on a CPU (a GPU computes in target.dtype); auto: as in train
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    shard_tokens: PositiveInt = 100_000  # tokens in one shard file (a longer row has its own); two shards are in memory at once
    # tokens in one forward pass of the target, pads included; lower it where extraction runs out of memory
    batch_tokens: PositiveInt = 4096


class Train(Block):
    """The loop that all methods share."""

    dir: str | None = None  # None: runs/<name of the recipe>
    # stored: read from features.dir; online: the target runs beside the head on every rank, only tokens are stored
    features: Literal["stored", "online"] = "stored"
    tokens_per_step: PositiveInt = 4096  # tokens (prompts included) in one optimizer step, over all ranks
    # tokens in one forward pass on one rank; lower it where memory runs out, the step stays the same
    micro_batch_tokens: PositiveInt = 4096
    max_steps: PositiveInt | None = None  # optimizer steps; not together with epochs
    # stop after so many minutes of steps (validation and checkpoints come on top); the schedule then follows the time share
    max_minutes: PositiveFloat | None = None
    epochs: PositiveInt | None = None  # passes over the training rows; not together with max_steps
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices between hidden states; the rest stays with AdamW
    lr: PositiveFloat = 1e-4  # peak learning rate, reached at the end of the warm-up; the same for Muon and AdamW
    # of the learning rate from the warm-up to the end: down to lr * min_lr_share, or constant at lr
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: Share = 0.05  # share of the run in which the learning rate rises from 0 to lr, linearly
    min_lr_share: Annotated[float, Field(ge=0, le=1)] = 0.0  # learning rate at the end over lr; without effect on constant
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # of matrices; norms and biases have none
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's; Muon has its own momentum
    clip_norm: PositiveFloat = 1.0  # a gradient whose norm over all parameters is larger is scaled down to it
    precision: Literal["fp32", "bf16", "auto"] = "fp32"  # bf16: autocast, fp32 master weights; auto: bf16 where it is twice as fast here
    threads: PositiveInt | None = None  # on a CPU, of each process; None: the cores that this process may use, over the processes
    seed: int = 0  # of initial weights, order of rows, noise and drops
    log_every: PositiveInt = 10  # steps between lines on the screen and in metrics.jsonl
    eval_every: PositiveInt = 250  # steps between validations; there is one at the start and one at the end too
    save_every: PositiveInt = 250  # steps between checkpoints; there is one at the end and one at an interruption too
    keep: PositiveInt = 2  # the newest so many checkpoints are kept
    trackers: list[Literal["tensorboard", "wandb"]] = []  # beside metrics.jsonl, which is always written; needs their packages

    @model_validator(mode="after")
    def _one_length(self):
        given = {k: getattr(self, k) for k in ("max_steps", "max_minutes", "epochs") if getattr(self, k) is not None}
        if not given:
            raise RecipeError("train: give one of train.max_steps, train.epochs or train.max_minutes; none is set.")
        if self.epochs is not None and self.max_steps is not None:
            raise RecipeError(f"train.epochs={self.epochs} and train.max_steps={self.max_steps} both set the length; keep one of them.")
        if self.micro_batch_tokens > self.tokens_per_step:
            raise RecipeError(
                f"train.micro_batch_tokens={self.micro_batch_tokens} is larger than train.tokens_per_step={self.tokens_per_step}; "
                f"lower it, or raise tokens_per_step."
            )
        return self


class Export(Block):
    """Where the served form of the head goes."""

    dir: str | None = None  # None: exports/<name of the recipe>


class Eval(Block):
    """What is measured, and against what."""

    # vllm: what is served; reference: plain PyTorch, with trees and the time of draft and verification apart
    engine: Literal["vllm", "reference"] = "vllm"
    # what is measured; the baseline (no drafts) always is
    methods: Several[Literal["baseline", "ngram", "suffix", "head"]] = ["baseline", "ngram", "head"]
    prompts: Several[str] = [
        "embedded:eval"
    ]  # files, `holdout` (own rows), `embedded:eval`, `embedded:repetitive`, `mt_bench`, `humaneval`
    max_prompts: PositiveInt | None = None  # per prompt set
    k: Several[PositiveInt] = [3]  # drafted tokens a round; each is measured
    temperature: Several[Annotated[float, Field(ge=0)]] = [0.0]  # of sampling, 0: greedy; each is measured
    # probabilistic: draw drafts from the head's distribution at temperature > 0 (n-gram, suffix and Medusa in vLLM never do)
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    max_tokens: PositiveInt = 128  # new tokens of an answer, at most
    concurrency: Several[PositiveInt] = [1]  # requests in flight; each is measured
    max_model_len: PositiveInt | None = None  # the engine's context, prompt and answer together; None: the target's, at most 4096
    ngram_max: PositiveInt = 5  # n-gram lookup: the longest run of last tokens that is looked for
    ngram_min: PositiveInt = 2  # n-gram lookup: the shortest
    tree: Literal["chain", "static", "eagle2", "medusa"] = "chain"  # reference engine only, measured beside the chains of `k`
    tree_nodes: PositiveInt = 60  # eagle2, medusa: nodes of a tree, the root included
    tree_depth: PositiveInt = 6  # eagle2, medusa: levels below the root
    tree_top_k: PositiveInt = 10  # eagle2, medusa: children of a node
    tree_paths: list[list[NonNegativeInt]] | None = None  # static: one path of ranks for each node, [[0], [1], [0, 0]]
    verification: Literal["tokenwise", "block", "typical"] = "tokenwise"  # reference engine, temperature > 0; typical is NOT lossless
    seed: int = 0  # of sampled answers and drafts
    dir: str | None = None  # None: reports/<name of the recipe>

    @model_validator(mode="after")
    def _consistent(self):
        if self.tree != "chain" and self.engine != "reference":
            raise RecipeError(
                f"eval.tree={self.tree!r} with eval.engine={self.engine!r}: vLLM drafts chains only; "
                f"set eval.engine=reference or eval.tree=chain."
            )
        if self.verification != "tokenwise" and self.engine != "reference":
            raise RecipeError(f"eval.verification={self.verification!r} with eval.engine={self.engine!r}: set eval.engine=reference.")
        if self.verification == "block" and self.draft_sample_method != "probabilistic":
            raise RecipeError(
                f"eval.verification='block' with eval.draft_sample_method={self.draft_sample_method!r}: block verification needs drafts "
                "that were sampled; set eval.draft_sample_method=probabilistic."
            )
        if (self.tree == "static") != (self.tree_paths is not None):
            raise RecipeError(
                f"eval.tree={self.tree!r} with eval.tree_paths={self.tree_paths}: give paths with eval.tree=static, and only then."
            )
        if self.ngram_min > self.ngram_max:
            raise RecipeError(f"eval.ngram_min={self.ngram_min} is larger than eval.ngram_max={self.ngram_max}; lower eval.ngram_min.")
        return self


class Recipe(Block):
    """One run from prompts to report. `name` is the file's path below recipes/, with dashes."""

    name: str  # names the folders in runs/, exports/ and reports/; left out, it is the file's path below recipes/, with dashes
    method: str  # one of the methods below; it decides what `head` and `objective` may hold
    target: Target  # the model that is served
    data: Data  # conversations and what of them is learnt
    features: Features  # the target's states on disk
    head: SerializeAsAny[HeadBlock]  # shape of the draft; keys by method
    objective: SerializeAsAny[Block]  # its loss; keys by method
    train: Train  # length, optimizer, checkpoints
    export: Export = Export()  # the folder that vLLM loads
    eval: Eval = Eval()  # what is measured at the end

    @model_validator(mode="after")
    def _head_reaches(self):
        reach = self.head.max_depth
        asked = {"eval.tree_depth": self.eval.tree_depth} if self.eval.tree == "medusa" else {"eval.k": max(self.eval.k)}
        for key, depth in asked.items():
            if reach is not None and "head" in self.eval.methods and depth > reach:
                raise RecipeError(
                    f"{key}={depth} asks for more drafted tokens than this head makes in a round, {reach}; lower it to {reach}."
                )
        return self

    @model_validator(mode="after")
    def _engine_runs_the_head(self):
        if self.eval.engine == "vllm" and "head" in self.eval.methods and (reason := self.head.not_served):
            raise RecipeError(f"eval.engine='vllm' with this head: {reason}")
        return self

    @property
    def run_dir(self) -> Path:
        """Folder of checkpoints, logs and the resolved recipe."""
        return Path(self.train.dir or f"runs/{self.name}")

    @property
    def export_dir(self) -> Path:
        """Folder that vLLM loads."""
        return Path(self.export.dir or f"exports/{self.name}")

    @property
    def report_dir(self) -> Path:
        """Folder of report.json, report.md and report.html."""
        return Path(self.eval.dir or f"reports/{self.name}")

    def dump(self) -> str:
        """The resolved recipe as YAML: written into every output folder."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, width=140)


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe file and apply `key.sub=value` overrides (values are YAML).

    Raises:
        RecipeError: no such file, malformed YAML or override, unknown, contradictory or ill-typed key.
    """
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(str(path), [str(p) for p in Path("recipes").rglob("*.yaml")], n=1, cutoff=0.3)
        raise RecipeError(f"no recipe file at {path}" + (f"; did you mean {near[0]}?" if near else ""))
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as e:
        raise RecipeError(f"{path} is not valid YAML: {e}") from None
    if not isinstance(raw, dict):
        raise RecipeError(f"{path} must hold a mapping (method:, target:, …), not {type(raw).__name__}")
    for text in overrides or []:
        _override(raw, text)
    raw.setdefault("name", _name_of(path))
    return parse_recipe(raw, source=str(path))


def parse_recipe(raw: dict[str, Any], source: str = "recipe") -> Recipe:
    """Check a plain mapping and return the recipe; `source` names it in errors."""
    raw = dict(raw)
    method = raw.get("method")
    if method not in METHODS:
        raise RecipeError(f"{source}: method: {method!r} is not one of {', '.join(METHODS)}")
    blocks = METHODS[method]
    try:
        for key, model in (("head", blocks.head), ("objective", blocks.objective)):
            try:
                raw[key] = model.model_validate(raw.get(key) or {})
            except ValidationError as e:
                raise RecipeError(_explain(e, source, model, key)) from None
        return Recipe.model_validate(raw)
    except ValidationError as e:
        raise RecipeError(_explain(e, source, Recipe)) from None


def _name_of(path: Path) -> str:
    """recipes/smollm2-135m/eagle3.yaml → smollm2-135m-eagle3."""
    parts = path.resolve().with_suffix("").parts
    below = parts[len(parts) - parts[::-1].index("recipes") :] if "recipes" in parts else parts[-1:]
    return "-".join(below)


def _override(raw: dict[str, Any], text: str) -> None:
    """Set one dotted key of `raw` in place from `key.sub=value`."""
    key, eq, value = text.partition("=")
    if not eq or not key:
        raise RecipeError(f"override {text!r} is not of the form key.sub=value, for instance train.max_steps=200")
    *path, last = key.split(".")
    node = raw
    for part in path:
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            raise RecipeError(f"override {text!r}: {part} is a value in the recipe, not a block")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        raise RecipeError(f"override {text!r}: {value!r} is not a YAML value") from None
    if isinstance(parsed, str):  # YAML 1.1 reads 1e-3 as text
        with contextlib.suppress(ValueError):
            parsed = float(parsed)
    node[last] = parsed


def _explain(error: ValidationError, source: str, model: type[BaseModel], prefix: str = "") -> str:
    """Turn pydantic's list of faults into lines that name key, value, and remedy."""
    lines = []
    for fault in error.errors():
        loc = [str(p) for p in fault["loc"]]
        key = ".".join([prefix] * bool(prefix) + loc)
        if fault["type"] == "extra_forbidden":
            known = _fields_at(model, loc[:-1])
            near = difflib.get_close_matches(loc[-1], known, n=1, cutoff=0.4)
            lines.append(f"unknown key {key}" + (f"; did you mean {near[0]}?" if near else f"; known keys here: {', '.join(known)}"))
        elif fault["type"] == "missing":
            lines.append(f"missing key {key}")
        else:
            message = fault["msg"].removeprefix("Value error, ")
            lines.append(f"{key} = {fault.get('input')!r}: {message}")
    return f"{source}: " + "\n  ".join(lines)


def _fields_at(model: type[BaseModel], loc: list[str]) -> list[str]:
    """Names of the fields of the (nested) model at `loc`."""
    for part in loc:
        field = model.model_fields.get(part)
        inner = (
            [a for a in (field.annotation, *getattr(field.annotation, "__args__", ())) if isinstance(a, type) and issubclass(a, BaseModel)]
            if field
            else []
        )
        if not inner:
            return []
        model = inner[0]
    return list(model.model_fields)
