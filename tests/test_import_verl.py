"""verl's scripts become recipes, and every key is accounted for."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from verl_cases import ANY_TEXT, ENVIRONMENT, PLAIN, SCRIPTS

from megatron_opo.cli import main
from megatron_opo.errors import OpoError, RecipeError
from megatron_opo.import_verl.command import (
    recipe_text,
    report,
    settings_of_words,
    settings_of_yaml,
)
from megatron_opo.import_verl.convert import Conversion, Setting, convert, nearest, rule_for
from megatron_opo.import_verl.page import tables
from megatron_opo.import_verl.shell import read_script
from megatron_opo.import_verl.table import DEFAULTS, MEGATRON_DEFAULTS, RULES
from megatron_opo.recipe import Recipe
from megatron_opo.recipe_file import field_paths, load_recipe

ROOT = Path(__file__).parents[1]
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
OPO = [
    "algorithm.adv_estimator=opo",
    "data.train_batch_size=1024",
    f"{MINI}=1024",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "actor_rollout_ref.actor.use_kl_loss=False",
    "actor_rollout_ref.actor.kl_loss_coef=0",
    "algorithm.use_kl_in_reward=False",
]
SHELL_TEXT = st.lists(
    st.sampled_from([*"abX=.$(){}[]'\"\\#;|&<>` \n\t7+-*/:,@~", "if ", "fi", "main_ppo ", "<<E"])
).map("".join)


def of_script(name: str) -> Conversion:
    command = read_script((SCRIPTS / name).read_text(), ENVIRONMENT)
    return convert(settings_of_words(command.words), command.notes, "/home/me")


def of_words(*words: str) -> Conversion:
    return convert(settings_of_words(words), home="/home/me")


def entry(conversion: Conversion, key: str):
    (found,) = [each for each in conversion.entries if each.key == key]
    return found


def loaded(conversion: Conversion, directory: Path) -> Recipe:
    path = directory / "recipe.yaml"
    path.write_text(recipe_text(conversion))
    return load_recipe(path)


def test_the_documented_opo_example_is_all_explained(tmp_path):
    conversion = of_words(*OPO)
    own = [each for each in conversion.entries if not each.by_default]
    assert len(own) == len(OPO)
    assert {each.status for each in own} == {"taken over"}
    assert all(each.fields or each.why for each in own)
    recipe = loaded(conversion, tmp_path)
    assert recipe.algorithm.estimator == "opo"
    assert recipe.rollout.prompts_per_step == 1024


def test_a_whole_opo_script(tmp_path):
    conversion = of_script("opo.sh")
    assert {e.status for e in conversion.entries} == {"taken over", "changed"}
    assert set(conversion.fill) == {"actor.tensor_parallel"}
    recipe = loaded(conversion, tmp_path)
    assert recipe.data.train.files == ("/home/me/data/skywork/train.parquet",)
    assert recipe.rollout.prompts_per_step == 256
    assert recipe.rollout.samples_per_prompt == 8
    assert (recipe.rollout.servers, recipe.rollout.tensor_parallel) == (4, 2)
    assert recipe.actor.micro_batch_tokens == 1024 + 8192
    assert recipe.optimizer.betas == (0.9, 0.999)  # verl's default, not ours
    assert recipe.optimizer.weight_decay == 0.01
    assert (recipe.train.steps, recipe.eval.every, recipe.checkpoint.every) == (500, 10, 50)
    assert recipe.eval.temperature == 0
    assert (recipe.log.loggers, recipe.log.project) == (("wandb",), "opo")


def test_several_updates_per_rollout_become_as_many_exact_steps(tmp_path):
    conversion = of_script("grpo_four_updates.sh")
    recipe = loaded(conversion, tmp_path)
    # 1024 prompts in mini batches of 256: 4 updates a rollout, so 100 rollouts are 400 updates.
    assert recipe.rollout.prompts_per_step == 256
    assert recipe.train.steps == 400
    # 8 GPUs, and verl's default of 2 for each engine.
    assert (recipe.rollout.servers, recipe.rollout.tensor_parallel) == (4, 2)
    assert (recipe.eval.every, recipe.checkpoint.every) == (20, 80)
    assert recipe.optimizer.warmup_steps == 40
    assert recipe.optimizer.lr == 1e-6
    assert recipe.algorithm.estimator == "dr_grpo"
    status = {each.key.rpartition(".")[2]: each.status for each in conversion.entries}
    broken = ("ppo_epochs", "use_kl_loss", "kl_loss_coef", "entropy_coeff", "top_p")
    assert [status[name] for name in broken] == ["changed"] * 5
    mini = entry(conversion, MINI)
    assert mini.status == "changed"
    assert "256 prompts (x rollout.n 5 = 1280 responses)" in mini.why
    assert "learning rate" in mini.why
    assert "rollout.temperature" in entry(conversion, "actor_rollout_ref.rollout.temprature").why
    assert entry(conversion, "reward_model.enable").status == "not supported"


def test_a_megatron_script_keeps_its_layout(tmp_path):
    conversion = of_script("dapo_moe_megatron.sh")
    recipe = loaded(conversion, tmp_path)
    actor = recipe.actor
    assert (actor.tensor_parallel, actor.pipeline_parallel, actor.expert_parallel) == (4, 2, 8)
    assert actor.sequence_parallel  # verl's default where Megatron trains
    assert actor.recompute == "full"
    assert actor.transformer_config == {"moe_permute_fusion": True}
    assert recipe.rollout.dynamic_sampling.max_rounds == 10
    assert recipe.algorithm.overlong_buffer == 4096
    assert recipe.eval.temperature == 0.6
    assert recipe.rollout.server_args["attention_backend"] == "fa3"
    assert {"data.train.files", "train.steps"} <= set(conversion.fill)
    assert recipe.checkpoint.every == 0  # the comment line ends the command before save_freq
    assert any("trainer.save_freq=5" in note for note in conversion.notes)


def test_a_yaml_with_a_critic(tmp_path):
    text = (SCRIPTS / "ppo.yaml").read_text()
    conversion = convert(settings_of_yaml(text, "ppo.yaml"), home="/home/me")
    recipe = loaded(conversion, tmp_path)
    assert recipe.name == "ppo_p"
    assert recipe.run_dir == "checkpoints/p/ppo_p"
    assert recipe.optimizer.min_lr == pytest.approx(1e-7)
    assert recipe.optimizer.warmup_steps == 10  # 0.05 x 200
    assert recipe.actor.micro_batch_tokens == 2 * (512 + 256)
    assert recipe.data.eval is None
    assert entry(conversion, "algorithm.adv_estimator").status == "not supported"
    assert "algorithm.estimator" in conversion.fill


@given(
    train=st.integers(1, 4096),
    mini=st.integers(1, 4096),
    n=st.integers(2, 9),
    rollouts=st.integers(1, 99),
)
def test_the_batch_of_an_update_and_their_number_are_kept(train, mini, n, rollouts):
    conversion = of_words(
        f"data.train_batch_size={train}",
        f"{MINI}={mini}",
        f"actor_rollout_ref.rollout.n={n}",
        f"trainer.total_training_steps={rollouts}",
    )
    recipe = Recipe.model_validate(conversion.recipe)
    updates = len(range(0, train, mini))
    assert recipe.rollout.prompts_per_step == min(train, mini)
    assert recipe.train.steps == rollouts * updates
    is_exact = updates == 1
    assert (entry(conversion, MINI).status == "taken over") == is_exact


@pytest.mark.parametrize(
    ("given_name", "ours"),
    [
        ("rloo", "rloo"),
        ("grpo_vectorized", "grpo"),
        ("remax", "remax"),
        ("reinforce_plus_plus", "reinforce_plus_plus"),
        ("optimal_token_baseline", "otb"),
    ],
)
def test_estimators(given_name, ours):
    conversion = of_words(f"algorithm.adv_estimator={given_name}")
    assert conversion.recipe["algorithm"]["estimator"] == ours


def test_epochs_are_counted_where_the_files_are(tmp_path):
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x"] * 35}), file)
    conversion = of_words(
        f"data.train_files={file}",
        "data.train_batch_size=10",
        f"{MINI}=5",
        "trainer.total_epochs=2",
    )
    # 3 whole rollouts an epoch, of 2 updates each.
    assert conversion.recipe["train"]["steps"] == 12


def test_the_last_of_two_settings_counts_and_the_first_is_listed():
    conversion = of_words("data.seed=1", "data.seed=2")
    assert conversion.recipe["seed"] == 2
    assert [e.value for e in conversion.entries if e.key == "data.seed"] == [1, 2]


@pytest.mark.parametrize(
    ("loggers", "ours", "project", "status"),
    [
        ("[console,wandb]", ("wandb",), "opo", "taken over"),
        ("[console,mlflow,tensorboard]", ("tensorboard", "mlflow"), "opo", "taken over"),
        ("trackio", ("trackio",), "opo", "taken over"),
        ("console", ("tensorboard",), "opo", "taken over"),
        ("[wandb,swanlab]", ("wandb",), "opo", "not supported"),
    ],
)
def test_loggers_of_verl(tmp_path, loggers, ours, project, status):
    words = (f"trainer.logger={loggers}", f"trainer.project_name={project}")
    conversion = of_words(*words, "trainer.experiment_name=a_run")
    recipe = loaded(conversion, tmp_path)
    assert (recipe.log.loggers, recipe.log.project, recipe.name) == (ours, project, "a_run")
    assert entry(conversion, "trainer.logger").status == status


def test_prometheus_of_verl(tmp_path):
    key = "actor_rollout_ref.rollout.prometheus.enable"
    for value, port in (("True", 9400), ("False", None)):
        recipe = loaded(of_words(f"{key}={value}"), tmp_path)
        assert recipe.log.prometheus_port == port


def test_a_deleted_key_counts_no_more_and_is_listed():
    conversion = of_words("data.seed=1", "trainer.logger=[wandb]", "~data.seed", "~trainer")
    assert "seed" not in conversion.recipe and "log" not in conversion.recipe
    assert [e.key for e in conversion.entries if not e.by_default] == ["~data.seed", "~trainer"]


def test_a_value_that_cannot_be_is_left_out_and_said(tmp_path):
    conversion = of_words("actor_rollout_ref.actor.optim.lr=-1", "data.max_prompt_length=long")
    loaded(conversion, tmp_path)
    for key in ("actor_rollout_ref.actor.optim.lr", "data.max_prompt_length"):
        assert entry(conversion, key).status == "not supported"
    assert {"optimizer.lr", "data.max_prompt_tokens"} <= set(conversion.fill)


def test_batches_that_are_not_known_are_not_guessed():
    conversion = of_words("data.train_batch_size=$BATCH", f"{MINI}=64", "trainer.test_freq=5")
    assert "prompts_per_step" not in conversion.recipe["rollout"]
    assert "rollout.prompts_per_step" in conversion.fill
    assert entry(conversion, MINI).status == "changed"


def test_secrets_are_not_copied(tmp_path):
    kwargs = "custom_reward_function.reward_kwargs"
    conversion = of_words(f"{kwargs}.api_key=sk-12", "+trainer.judge_token=sk-12", f"{kwargs}.k=2")
    assert "sk-12" not in recipe_text(conversion)
    assert loaded(conversion, tmp_path).reward.kwargs == {"k": 2}
    assert "reward.kwargs.api_key" in conversion.fill


def test_warmup_longer_than_the_run_still_loads(tmp_path):
    optim = "actor_rollout_ref.actor.optim"
    loaded(of_words(f"{optim}.warmup_style=cosine", f"{optim}.lr_warmup_steps=900"), tmp_path)


KEYS = st.sampled_from([rule.key.replace("*", "x") for rule in RULES])
VALUES = (
    PLAIN | st.lists(PLAIN, max_size=2) | st.sampled_from(["$X", "${data.x}", "full", 0, -1, 2])
)


@given(st.dictionaries(KEYS, VALUES, max_size=12))
def test_any_values_of_known_keys_make_a_recipe_that_loads_and_none_is_lost(values):
    conversion = convert([Setting(key, value) for key, value in values.items()])
    own = [each for each in conversion.entries if not each.by_default]
    assert sorted(each.key for each in own) == sorted(values)
    assert all(each.status != "unknown" for each in own)
    assert all(each.fields or each.why for each in own)
    Recipe.model_validate(yaml.safe_load(recipe_text(conversion)))


@given(SHELL_TEXT | ANY_TEXT)
def test_no_text_makes_it_stumble(text):
    command = read_script(text, {"a": "b"})
    conversion = convert(settings_of_words(command.words), command.notes)
    assert "".join(report(conversion)).isascii()


@given(SHELL_TEXT | ANY_TEXT)
def test_no_yaml_makes_it_stumble(text):
    try:
        conversion = convert(settings_of_yaml(text, "x.yaml"))
    except OpoError as error:
        assert "x.yaml" in str(error)
    else:
        Recipe.model_validate(conversion.recipe)


def test_deep_nesting_and_growth_are_no_trouble():
    growing = "X=aa\n" + "X=$X$X$X\n" * 40 + "main_ppo data.seed=$X\n"
    assert convert(settings_of_words(read_script(growing, {}).words)).entries
    deep = "main_ppo a.b=" + "${x:-" * 3000 + " c.d=$((" + "(" * 3000 + "e.f=" + "[" * 3000
    convert(settings_of_words(read_script(deep, {}).words))


def test_unknown_keys_get_a_near_name():
    assert (
        nearest("actor_rollout_ref.rollout.temprature") == "actor_rollout_ref.rollout.temperature"
    )
    assert nearest("trainer.n_gpu_per_node") == "trainer.n_gpus_per_node"
    assert nearest("zzz") == ""


def test_every_rule_is_reached_by_its_key_and_names_a_field_of_the_recipe():
    known = set(field_paths())
    assert len({rule.key for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule_for(rule.key.replace(".*", ".something_new")) is rule
        for name in filter(None, rule.becomes.replace("`", "").split(", ")):
            top = name if name in known else name.rpartition(".")[0]
            assert top in known, rule.key
    assert all(rule_for(key) for key in DEFAULTS | MEGATRON_DEFAULTS)


def test_the_page_has_the_tables_of_the_rules():
    assert tables() in (ROOT / "docs" / "from_verl.md").read_text()


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["import-verl", *words])
    return ended.value.code


def test_who_trains_a_config_of_verl_hears_of_this_command():
    with pytest.raises(RecipeError, match=r"actor_rollout_ref.*import-verl"):
        load_recipe(SCRIPTS / "ppo.yaml")


def test_the_command_writes_a_recipe_once(tmp_path, capsys):
    out = tmp_path / "recipe.yaml"
    assert run(str(SCRIPTS / "opo.sh"), "--out", str(out), "data.seed=3") == 0
    assert load_recipe(out).seed == 3
    shown = capsys.readouterr().out
    assert "trainer.save_freq=50" in shown and str(out) in shown
    before = out.read_bytes()
    assert run(str(SCRIPTS / "opo.sh"), "--out", str(out)) == 2
    assert "is there already" in capsys.readouterr().err
    assert out.read_bytes() == before


def test_the_command_takes_overrides_alone_and_shows_the_recipe(capsys):
    assert run("--", "--config-name=ppo_megatron_trainer", "+data.seed=5", *OPO) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["seed"] == 5
    assert Recipe.model_validate(shown).algorithm.estimator == "opo"


def test_the_command_speaks_json(capsys):
    assert run("--json", *OPO) == 0
    told = json.loads(capsys.readouterr().out)
    assert Recipe.model_validate(told["recipe"])
    assert {k["key"] for k in told["keys"] if not k["by_default"]} == {
        word.partition("=")[0] for word in OPO
    }


@pytest.mark.parametrize("words", [["nowhere.sh"], [], ["/dev/null"], [str(SCRIPTS)]])
def test_mistakes_are_said_in_one_line(words, capsys):
    assert run(*words) == 2
    assert capsys.readouterr().err.startswith("error: ")


NEWER = "algorithm.rollout_correction"
CAP = "actor_rollout_ref.actor.tis_imp_ratio_cap"


@pytest.mark.parametrize(
    ("words", "correction"),
    [
        ([f"{NEWER}.rollout_is=token"], ("truncate", "token", 2.0, None)),
        (
            [f"{NEWER}.rollout_is=token", f"{NEWER}.rollout_is_threshold=0.5_5.0"],
            ("mask", "token", 5.0, 0.5),
        ),
        (
            [f"{NEWER}.rollout_rs=seq_mean_k1", f"{NEWER}.rollout_rs_threshold=0.999_1.001"],
            ("mask", "geometric", 1.001, 0.999),
        ),
        (
            [
                "algorithm.rollout_is=True",
                "algorithm.rollout_is_threshold=3",
                "algorithm.rollout_is_level=sequence",
                "algorithm.rollout_is_mode=mask",
                "algorithm.rollout_is_threshold_lower=0.4",
            ],
            ("mask", "sequence", 3.0, 0.4),
        ),
        (["algorithm.rollout_is=True", "algorithm.rollout_is_threshold=null"], None),
        ([f"{CAP}=3"], ("truncate", "token", 3.0, None)),
        ([f"{CAP}=-1"], None),
        ([f"{NEWER}.rollout_rs=seq_max_k2", f"{NEWER}.rollout_rs_threshold=0.1"], None),
        ([f"{NEWER}.rollout_is=token", f"{NEWER}.rollout_is_threshold=0.5"], None),
    ],
)
def test_corrections_by_the_ratio(words, correction, tmp_path):
    found = loaded(of_words(*words), tmp_path).algorithm.correction
    kind, level, upper, lower = correction or ("none", "token", 2.0, None)
    assert (found.kind, found.level, found.upper, found.lower) == (kind, level, upper, lower)


def test_of_two_corrections_one_is_taken_and_the_other_said():
    conversion = of_words(
        f"{NEWER}.rollout_rs=token_k1", f"{NEWER}.rollout_is=sequence", f"{CAP}=2"
    )
    assert conversion.recipe["algorithm"]["correction"]["level"] == "sequence"
    for key in (f"{NEWER}.rollout_rs", CAP):
        assert entry(conversion, key).status == "not supported"
        assert f"{NEWER}.rollout_is" in entry(conversion, key).why
