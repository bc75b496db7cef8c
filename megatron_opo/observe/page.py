"""HTML pages in one file: style, data and scripts inside, and nothing that the page may fetch."""

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

import jinja2

from megatron_opo.observe.report_samples import VISIBLE_CONTROLS


def render(template: str, samples: dict[str, Any], *, live: bool = False, **context: Any) -> str:
    """The page of a template of this directory, with a browser of `samples` (`browser_data`).

    Everything in `context` is escaped but what the template calls safe. Only the scripts that
    stand in this directory run, whatever a model wrote: the policy names them by their hashes.
    """
    names = ["samples.js", "charts.js", *(["live.js"] if live else [])]
    scripts = [_source(name) for name in names]
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_source),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    page = environment.get_template(template).render(
        css=_source("report.css"),
        policy=_policy(scripts, live),
        scripts=scripts,
        samples_json=_json_in_html(samples),
        kept=_kept(samples),
        **context,
    )
    return page.translate(VISIBLE_CONTROLS)


def _source(name: str) -> str:
    return files("megatron_opo.observe").joinpath(name).read_text(encoding="utf-8")


def _policy(scripts: list[str], live: bool) -> str:
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    fetches = "; connect-src 'self'" if live else ""
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'{fetches}; "
        "base-uri 'none'; form-action 'none'"
    )


def _json_in_html(value: Any) -> str:
    """JSON that ends no script element and opens no comment."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _kept(samples: dict[str, Any]) -> str:
    shown, there, cut = (samples[name] for name in ("files_shown", "files", "files_cut"))
    if shown == there and not cut:
        return ""
    few = f"{shown:,} of {there:,} steps and evaluations, spread evenly"
    of_them = f"{cut:,} of them" if shown < there else f"{cut:,} of {there:,} steps and evaluations"
    first = f"only the first responses of {of_them}"
    parts = [f"the samples of {few}" if shown < there else "", first if cut else ""]
    return (
        f"To keep this page small it has {', and '.join(filter(None, parts))}; the others are in "
        "samples/."
    )
