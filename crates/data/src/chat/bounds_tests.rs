//! Templates that create huge values, each in a different way. All of them must end in an error, soon and without
//! using much memory.

use std::time::{Duration, Instant};

use serde_json::json;

use super::{MAX_TOTAL_BYTES, MAX_VALUE_BYTES};
use crate::{Chat, ChatTemplate, DateTime, TemplateSource, Tokenizer, TokenizerSource};

fn render(template: &str) -> Result<String, String> {
    let tokenizer = Tokenizer::load(&TokenizerSource::Byte).unwrap();
    let source = TemplateSource::Inline(template.into());
    let template = ChatTemplate::load(&source, &tokenizer, DateTime::default()).map_err(|e| e.to_string())?;
    let chat = Chat { messages: vec![json!({"role": "user", "content": "hi"})], ..Chat::default() };
    template.render(&chat, false).map_err(|e| e.to_string())
}

/// The peak memory of this process; 0 if the system does not report it.
fn peak_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<usize>().ok()).map_or(0, |kib| kib << 10)
}

/// A template that repeats `step` forty times, which sets `ns.s`.
fn repeated(first: &str, step: &str) -> String {
    format!(
        "{{% set ns = namespace(s={first}) %}}{{% for i in range(40) %}}{step}{{% endfor %}}{{{{ ns.s|length }}}}"
    )
}

/// A template that runs `body` in nested loops, about 10^8 times.
fn in_loops(body: &str) -> String {
    let loops = "{% for i in range(9999) %}{% for j in range(9999) %}";
    format!("{{% set ns = namespace(l=[]) %}}{loops}{body}{{% endfor %}}{{% endfor %}}")
}

#[test]
fn templates_cannot_double_values_for_ever() {
    assert_all_stop(&[
        // Strings that double.
        repeated("'x'", "{% set ns.s = ns.s ~ ns.s %}"),
        repeated("'x'", "{% set ns.s = ns.s + ns.s %}"),
        repeated("'x'", "{% set ns.s = ns.s * 2 %}"),
        repeated("'x'", "{% set ns.s = 2 * ns.s %}"),
        repeated("'x'", "{% set ns.s = [ns.s, ns.s]|join %}"),
        repeated("'x'", "{% set ns.s = ''.join([ns.s, ns.s]) %}"),
        repeated("'x'", "{% set ns.s = ns.s|replace('x', 'xx') %}"),
        repeated("'x'", "{% set ns.s = ns.s.replace('x', 'xx') %}"),
        repeated("'x'", "{% set ns.s = '%s%s'|format(ns.s, ns.s) %}"),
        repeated("'x'", "{% set ns.s = '{}{}'.format(ns.s, ns.s) %}"),
        repeated("'x'", "{% set ns.s = [ns.s, ns.s]|sum(start='') %}"),
        repeated("'x'", "{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}"),
        repeated("'x'", "{% set t %}{% filter upper %}{{ ns.s }}{{ ns.s }}{% endfilter %}{% endset %}{% set ns.s = t %}"),
        repeated("'x'", "{% set ns.s = [ns.s, ns.s]|string %}"),
        repeated("'x'", "{% set ns.s = [ns.s, ns.s]|tojson %}"),
        repeated("'x'", "{% set ns.s = [ns.s, ns.s]|pprint %}"),
        repeated("'x'", "{% set ns.s = ns.s if false else ns.s ~ ns.s %}"),
        "{% macro twice(s) %}{{ s }}{{ s }}{% endmacro %}".to_string() + &repeated("'x'", "{% set ns.s = twice(ns.s) %}"),
        "{% macro wrap() %}{{ caller() }}{{ caller() }}{% endmacro %}".to_string()
            + &repeated("'x'", "{% set t %}{% call wrap() %}{{ ns.s }}{% endcall %}{% endset %}{% set ns.s = t %}"),
        "{% macro more(s, n) %}{% if n %}{{ more(s ~ s, n - 1) }}{% endif %}{% endmacro %}{{ more('x', 40) }}".into(),
        // Lists that double, also as trees that share their branches.
        repeated("[0]", "{% set ns.s = ns.s + ns.s %}"),
        repeated("[0]", "{% set ns.s = ns.s * 2 %}"),
        repeated("[0]", "{% set ns.s = (ns.s + ns.s)|list %}"),
        repeated("(0,)", "{% set ns.s = ns.s + ns.s %}"),
        repeated("(0,)", "{% set ns.s = ns.s * 2 %}"),
        repeated("[0]", "{% set ns.s = [ns.s, ns.s] %}"),
        repeated("[0]", "{% set ns.s = (ns.s, ns.s) %}"),
        repeated("[0]", "{% set ns.s = {'a': ns.s, 'b': ns.s} %}"),
        repeated("[0]", "{% set ns.s = dict(a=ns.s, b=ns.s) %}"),
        repeated("[0]", "{% set ns.s = ns.s|chain(ns.s)|list %}"),
    ]);
}

#[test]
fn templates_cannot_create_huge_values() {
    let long = "{% set s = 'x' * 1000000 %}";
    assert_all_stop(&[
        // Single operations with a huge result.
        "{{ 'x' * 10**9 }}".into(),
        "{{ ([0] * 10**9)|length }}".into(),
        "{{ (0, 1) * 10**9 }}".into(),
        "{{ range(10**9)|list }}".into(),
        "{{ '%1000000000d'|format(1) }}".into(),
        "{{ '%.1000000000f'|format(1.0) }}".into(),
        "{{ '%*d'|format(1000000000, 1) }}".into(),
        "{{ '{:>1000000000}'.format(1) }}".into(),
        "{{ '{:{}}'.format('a', 1000000000) }}".into(),
        "{{ 'x'|indent(10**9, true) }}".into(),
        "{{ [1]|batch(10**9, 0)|list }}".into(),
        "{{ [1]|slice(10**9, 0)|list }}".into(),
        format!("{long}{{{{ s|replace('', s) }}}}"),
        format!("{long}{{{{ s.replace('x', s) }}}}"),
        format!("{long}{{{{ ([0] * 1000)|join(s) }}}}"),
        format!("{long}{{{{ s.join([0] * 1000) }}}}"),
        format!("{long}{{{{ s|join(s) }}}}"),
        format!("{long}{{{{ ('{{}}' * 1000).format(s) }}}}"),
        format!("{long}{{{{ ('{{0}}' * 1000).format(s) }}}}"),
        format!("{long}{{{{ ([0] * 1000)|tojson(indent=s) }}}}"),
        format!("{long}{{{{ ([0] * 1000)|tojson(separators=(s, s)) }}}}"),
        format!("{long}{{{{ ([0] * 1000)|map('default', s, true)|list }}}}"),
        format!("{long}{{% set s = s * 10 %}}{{{{ s|list|length }}}}"),
        format!("{long}{{% set s = s * 10 %}}{{{{ s.split('x')|length }}}}"),
        format!("{long}{{% set s = s * 10 %}}{{% for c in s %}}{{% endfor %}}"),
        // Many values that are kept: copies, text between tags, macros.
        format!("{long}{}", in_loops("{% set ns.l = ns.l + [s[1:]] %}")),
        format!("{long}{}", in_loops("{% set ns.l = ns.l + [s|upper] %}")),
        in_loops(&"raw ".repeat(100)),
        format!("{{% set t %}}{}{{% endset %}}", in_loops(&"raw ".repeat(100))),
        in_loops("{% macro m() %}{{ i }}{{ j }}{% endmacro %}"),
        // Deep nesting, and values that contain themselves.
        "{% set ns = namespace(s=[]) %}{% for i in range(9999) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s }}".into(),
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}".into(),
        "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns|tojson }}".into(),
        "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns ~ '' }}".into(),
        "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ [ns, 1] }}".into(),
    ]);
}

/// Every template ends with an error, soon, and without much memory.
fn assert_all_stop(cases: &[String]) {
    let expected = [
        "a value exceeds 32.0 MiB",
        "the values exceed 256 MiB in total",
        "values are nested more than 160 levels deep",
        "range has too many elements",
    ];
    for case in cases {
        let (before, start) = (peak_bytes(), Instant::now());
        let error = render(case).unwrap_err();
        assert!(expected.iter().any(|text| error.contains(text)), "{case}: {error}");
        let grew = peak_bytes().saturating_sub(before);
        // The values themselves, growth by doubling, and what an operation holds while it runs.
        assert!(grew < 2 * MAX_TOTAL_BYTES, "{case}: {grew} bytes");
        assert!(start.elapsed() < Duration::from_secs(20), "{case}: {:?}", start.elapsed());
    }
}

/// Deep syntax trees would overflow the stack in the engine's recursion.
#[test]
fn long_chains_are_errors() {
    for (before, link, after) in [
        ("{{ 1", " ~ 1", " }}"),
        ("{{ 1", "|abs", " }}"),
        ("{{ a", ".b", " }}"),
        ("{{ a", "[0]", " }}"),
        ("{{ ", "not ", "1 }}"),
        ("{{ ", "-", "1 }}"),
        ("{{ 1", " if 1 else 1", " }}"),
        ("{% if 1 %}", "{% elif 1 %}", "{% endif %}"),
    ] {
        let error = render(&format!("{before}{}{after}", link.repeat(50_000))).unwrap_err();
        let limits = ["a tag has more than 2000 tokens", "the template has more than 500 elif branches"];
        assert!(limits.iter().any(|limit| error.contains(limit)), "{link}: {error}");
        // A chain of a plausible length is accepted.
        let short = render(&format!("{before}{}{after}", link.repeat(300)));
        assert!(!matches!(&short, Err(e) if e.contains("has more than")), "{link}: {short:?}");
    }
}

#[test]
fn values_within_the_limits_are_created() {
    let most = MAX_VALUE_BYTES - 64;
    assert_eq!(render(&format!("{{{{ ('x' * {most})|length }}}}")), Ok(most.to_string()));
    assert_eq!(render("{{ ([0] * 100000)|length }}"), Ok("100000".into()));
    assert_eq!(render("{{ 3 * 4 }} {{ 2.5 * 2 }} {{ 1 + 2 }} {{ 1 + 0.5 }}"), Ok("12 5.0 3 1.5".into()));
    assert_eq!(render("{{ 'a' + 'b' ~ 1 ~ [1, 'b'] }}"), Ok("ab1[1, 'b']".into()));
    assert_eq!(render("{{ ([1] + [2])|join('-') }} {{ (1, 2) + (3,) }}"), Ok("1-2 (1, 2, 3)".into()));
    // Errors refer to the line and the code of the original template.
    let error = render("one\n{{ ['b', 2] ~ 1 }}\n{{ 'a' + 1 }}").unwrap_err();
    assert!(error.contains("`chat_template` line 3") && error.ends_with("in `'a' + 1`"), "{error}");
}
