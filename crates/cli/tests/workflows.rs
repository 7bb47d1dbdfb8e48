//! The workflows under `.github`: they parse, build what a release promises, and mark what no test has run on.

use std::fs;
use std::path::{Path, PathBuf};

use granit_parser::{Event, Parser};
use serde_json::{Map, Value};

/// The targets of a release and whether a test has run on them.
const TARGETS: &[(&str, bool)] = &[("x86_64-unknown-linux-gnu", true), ("aarch64-unknown-linux-gnu", false)];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// One YAML document as JSON. Scalars stay strings; a repeated key is an error, as it is for the workflow's runner.
pub(crate) fn yaml(source: &str) -> Value {
    fn node<'a>(event: Event<'a>, events: &mut dyn Iterator<Item = Event<'a>>) -> Value {
        match event {
            Event::Scalar(text, ..) => Value::String(text.into_owned()),
            Event::SequenceStart(..) => {
                let mut items = Vec::new();
                loop {
                    match events.next().unwrap() {
                        Event::SequenceEnd => return Value::Array(items),
                        event => items.push(node(event, events)),
                    }
                }
            }
            Event::MappingStart(..) => {
                let mut map = Map::new();
                loop {
                    let key = match events.next().unwrap() {
                        Event::MappingEnd => return Value::Object(map),
                        event => node(event, events),
                    };
                    let key = text(&key).to_string();
                    let value = node(events.next().unwrap(), events);
                    assert!(map.insert(key.clone(), value).is_none(), "the key `{key}` is repeated");
                }
            }
            event => panic!("{event:?} has no meaning in a workflow"),
        }
    }
    let events: Vec<_> = Parser::new_from_str(source).map(|event| event.unwrap().0).collect();
    let mut events =
        events.into_iter().skip_while(|event| matches!(event, Event::StreamStart | Event::DocumentStart(..)));
    let first = events.next().unwrap();
    let document = node(first, &mut events);
    assert!(
        matches!(events.next(), Some(Event::DocumentEnd)) && matches!(events.next(), Some(Event::StreamEnd))
    );
    document
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is not a string"))
}

fn workflow(name: &str) -> Value {
    yaml(&fs::read_to_string(root().join(".github/workflows").join(name)).unwrap())
}

fn steps(job: &Value) -> &[Value] {
    job["steps"].as_array().unwrap()
}

/// Everything that the steps of a job run, in order.
fn commands(job: &Value) -> String {
    steps(job).iter().filter_map(|step| step["run"].as_str()).collect::<Vec<_>>().join("\n")
}

#[test]
fn every_workflow_is_complete() {
    let mut seen = 0;
    for entry in fs::read_dir(root().join(".github/workflows")).unwrap() {
        let path = entry.unwrap().path();
        let workflow = yaml(&fs::read_to_string(&path).unwrap());
        assert!(workflow["on"].is_object(), "{} is never started", path.display());
        // A token that can write is asked for by the job that needs it.
        assert_eq!(workflow["permissions"]["contents"], "read", "{}", path.display());
        for (name, job) in workflow["jobs"].as_object().unwrap() {
            assert!(job["runs-on"].is_string(), "{}: {name} runs nowhere", path.display());
            for step in steps(job) {
                let does_one_thing = step["run"].is_string() != step["uses"].is_string();
                assert!(does_one_thing, "{}: {name}: {step}", path.display());
                let pinned = step["uses"].as_str().is_none_or(|action| action.contains("@v"));
                assert!(pinned, "{}: {name}: {step} has no version", path.display());
            }
        }
        seen += 1;
    }
    assert_eq!(seen, 2, "workflows other than ci and release");
}

#[test]
fn scripts_that_workflows_run_are_executable() {
    use std::os::unix::fs::PermissionsExt;
    for (name, job, script) in [("ci.yml", "test", ".ci/run"), ("release.yml", "build", "tools/dist.sh")] {
        assert!(commands(&workflow(name)["jobs"][job]).contains(script), "{name} does not run {script}");
        let mode = fs::metadata(root().join(script)).unwrap().permissions().mode();
        assert!(mode & 0o100 != 0, "{script} is not executable");
    }
}

#[test]
fn a_release_has_wheels_and_archives_for_both_targets() {
    let release = workflow("release.yml");
    let glibc = text(&release["env"]["OLDEST_GLIBC"]);
    let build = &release["jobs"]["build"];
    // AlmaLinux 8 has glibc 2.28.
    assert_eq!((text(&build["container"]), glibc), ("almalinux:8", "2.28"));

    let matrix = build["strategy"]["matrix"]["include"].as_array().unwrap();
    let targets: Vec<(&str, bool)> =
        matrix.iter().map(|entry| (text(&entry["target"]), text(&entry["tested"]) == "true")).collect();
    assert_eq!(targets, TARGETS);
    for entry in matrix {
        let arch = text(&entry["target"]).split('-').next().unwrap();
        let tag = format!("manylinux_{}_{arch}", glibc.replace('.', "_"));
        assert_eq!(text(&entry["wheel"]), tag);
        // Both build on a machine of their own kind: dist.sh builds for the host.
        assert_eq!(text(&entry["runner"]).ends_with("-arm"), arch == "aarch64");
    }
    let commands = commands(build);
    for wanted in [
        "host: ${{ matrix.target }}",
        "tools/dist.sh dist \"$OLDEST_GLIBC\"",
        "maturin build --release --locked --compatibility manylinux_2_28 --out dist",
        "dist/*-${{ matrix.wheel }}.whl",
    ] {
        assert!(commands.contains(wanted), "the build does not run `{wanted}`");
    }
    let publish = &release["jobs"]["publish"];
    assert_eq!(publish["needs"], "build");
    assert_eq!(publish["if"], "github.ref_type == 'tag'");
    assert!(self::commands(publish).contains("sha256sum * >SHA256SUMS"));
}

#[test]
fn untested_targets_are_marked() {
    let release = workflow("release.yml");
    let build = &release["jobs"]["build"];
    let step = |name: &str| steps(build).iter().find(|step| step["name"] == name).unwrap();
    assert_eq!(step("Tests")["if"], "matrix.tested");
    assert!(text(&step("Tests")["run"]).contains("cargo test --workspace --locked"));
    let archive = step("Archive and debug information");
    assert_eq!(archive["env"]["UNTESTED"], "${{ !matrix.tested && 'yes' || '' }}");
    let dist = fs::read_to_string(root().join("tools/dist.sh")).unwrap();
    assert!(dist.contains("name=lockstep-$version-$target${UNTESTED:+-untested}"));

    let notes = commands(&release["jobs"]["publish"]);
    for (target, tested) in TARGETS {
        let arch = target.split('-').next().unwrap();
        let (tested_part, untested_part) = notes.split_once("Untested: ").unwrap();
        assert_eq!(tested_part.contains(arch), *tested, "{notes}");
        assert_eq!(untested_part.contains(arch), !*tested, "{notes}");
    }
}

#[test]
fn the_wheel_holds_the_binary() {
    let project = fs::read_to_string(root().join("pyproject.toml")).unwrap();
    for line in [
        "build-backend = \"maturin\"",
        "bindings = \"bin\"",
        "manifest-path = \"crates/cli/Cargo.toml\"",
        "locked = true",
        "license-files = [\"LICENSE-MIT\", \"LICENSE-APACHE\"]",
    ] {
        assert!(project.lines().any(|l| l == line), "pyproject.toml has no line `{line}`");
    }
}

#[test]
fn yaml_is_read() {
    let read = yaml("a: {b: [1, two]}\nc: |\n  x: y\n  z\n");
    assert_eq!(read, serde_json::json!({"a": {"b": ["1", "two"]}, "c": "x: y\nz\n"}));
    assert!(std::panic::catch_unwind(|| yaml("a: 1\na: 2\n")).is_err());
    assert!(std::panic::catch_unwind(|| yaml("a: [1\n")).is_err());
}
