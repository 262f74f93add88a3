"""From the name or path of a config page to a validated run."""

import ast
import difflib
import importlib
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ml_collections import ConfigDict

from transformer import families
from transformer.mapping import from_mapping
from transformer.settings import Settings, SettingsError, check
from transformer.spec import Model


@dataclass(frozen=True)
class Run:
    """A validated run: what the model is, how it runs, and the plain values that both came from."""

    spec: Model
    settings: Settings
    values: dict[str, Any]


def load_config(reference: str) -> ConfigDict:
    """The config that "configs/llama3.py:8b", "llama3:8b" or "llama3" (the page's default size) names, or a run's own.

    That is "runs/mini/config.json", which a workdir keeps.

    Fields may follow, so that one text names a run of a sweep: "llama3:mini,train.steps=100,optimizer.peak_lr=1e-2".
    Values are written as for `override`.

    Raises:
      SettingsError: no such page, size or field, or a page without get_config.
    """
    name, _, rest = reference.partition(":")
    if name.endswith(".json"):
        remedy = "a run's config has no sizes; set its fields by --config.group.field=value"
        check(not rest, "config", reference, remedy)
        return _of_run(name)
    size, *options = _parts(rest)
    page = _page_at(name) if name.endswith(".py") or os.sep in name else _page_named(name)
    if not hasattr(page, "get_config"):
        raise SettingsError(f"config={reference!r}: {page.__file__} has no get_config(size)")
    try:
        found = page.get_config(*([size] if size else []))
    except (ValueError, TypeError) as error:
        raise SettingsError(f"config={reference!r}: {error}") from None
    except Exception as error:  # whatever a page of the user's own may raise
        raise SettingsError(f"config={reference!r}: get_config fails ({type(error).__name__}: {error})") from error
    if not isinstance(found, ConfigDict):
        raise SettingsError(f"config={reference!r}: get_config gives {type(found).__name__}, expected a ConfigDict")
    if not options:
        return found
    values = found.to_dict()
    for option in options:
        field, equals, text = option.partition("=")
        if not equals:
            raise SettingsError(f"config={reference!r}: {option!r} behind the size is no field=value")
        override(values, field, text)
    return ConfigDict(values)


def _parts(text: str) -> list[str]:
    """What stands between the commas of a text that are within no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += not quote and ((letter in "([{") - (letter in ")]}"))
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _of_run(path: str) -> ConfigDict:
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except OSError as error:
        raise SettingsError(f"config={path!r}: can't be read ({error.strerror}); give a run's config.json") from None
    except ValueError as error:
        raise SettingsError(f"config={path!r}: damaged ({error}); give a run's config.json") from None
    if not (isinstance(values, dict) and isinstance(values.get("model"), dict)):
        raise SettingsError(f"config={path!r}: not the config of a run (no model); give a run's config.json")
    return ConfigDict(values)


def _page_at(path: str):
    if not (os.path.isfile(path) and path.endswith(".py")):
        raise SettingsError(f"config={path!r}: no such page; give one such as configs/llama3.py:mini")
    loader = importlib.util.spec_from_file_location("_config_page", path)
    page = importlib.util.module_from_spec(loader)
    try:
        loader.loader.exec_module(page)
    except Exception as error:  # whatever a page of the user's own may raise
        raise SettingsError(f"config={path!r}: can't be run ({type(error).__name__}: {error})") from error
    return page


def _page_named(name: str):
    if name not in families.names():
        known = ", ".join(families.names())
        raise SettingsError(f"config={name!r}: unknown; use one of {known}, or the path of a config page")
    return importlib.import_module(f"configs.{name}")


def resolve(config: ConfigDict | Mapping[str, Any]) -> Run:
    """Validates a whole config.

    Raises:
      SettingsError, SpecError: naming the field, its value and the remedy.
    """
    values = config.to_dict() if isinstance(config, ConfigDict) else dict(config)
    # `init_from` tells where the first parameters came from; train.py fills it.
    rest = {key: value for key, value in values.items() if key not in ("model", "init_from")}
    if "model" not in values:
        raise SettingsError("model: required; a config page's get_config fills it")
    spec, settings = families.build_spec(values["model"]), from_mapping(Settings, rest)
    if spec.length_limit is not None and settings.data.seq_len > spec.length_limit:
        raise SettingsError(
            f"data.seq_len={settings.data.seq_len}: the model's learned positions end at "
            f"model.max_length={spec.length_limit}; use a shorter row"
        )
    asked = settings.train.sample_every
    if asked and spec.decoder is None:
        raise SettingsError(f"train.sample_every={asked}: an encoder alone writes no text; use 0 (never)")
    weight, depth = settings.train.mtp_weight, spec.mtp.depth if spec.mtp else 0
    if bool(weight) != bool(depth):
        remedy = "use a positive weight, such as 0.3, or model.mtp=0" if depth else "use 0: this model has none"
        raise SettingsError(f"train.mtp_weight={weight}: {depth} modules of multi-token prediction; {remedy}")
    return Run(spec=spec, settings=settings, values=values)


def override(values: dict[str, Any], name: str, text: str) -> None:
    """Sets field `name` ("group.field") of a config to the value that `text` writes: a Python literal, else a string.

    Raises:
      SettingsError: no such field.
    """
    *groups, last = name.split(".")
    place = values
    for group in groups:
        place = place.get(group) if isinstance(place, dict) else None
    if not isinstance(place, dict):
        raise SettingsError(f"{name}={text!r}: no such group; use one of {', '.join(values)}")
    if last not in place and groups[:1] != ["model"]:  # a model's optional fields are told by its family
        close = difflib.get_close_matches(last, place, n=1)
        hint = f"did you mean {'.'.join([*groups, close[0]])}?" if close else f"known: {', '.join(place)}"
        raise SettingsError(f"{name}={text!r}: unknown field; {hint}")
    try:
        place[last] = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        place[last] = text


def differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> list[str]:
    """The fields in which two configs differ, one line each: "name: old -> new"."""
    lines = []
    for key in sorted({*old, *new}):
        a, b, name = old.get(key), new.get(key), f"{path}{key}"
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, name + ".")
        elif _plain(a) != _plain(b):
            lines.append(f"{name}: {a!r} -> {b!r}")
    return lines


def _plain(value: Any) -> Any:
    """Tuples as lists, as JSON keeps them."""
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value
