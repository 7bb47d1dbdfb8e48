//! What a program sees of the environment.

use lockstep_rewards::{EnvVar, Program, RewardContext, RewardSpec, open};

use crate::support::{PATIENT_S, environment, score, shell};

#[test]
fn no_secret_reaches_a_program() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("environment");
    let body = format!(
        r#"read -r line; env > {}; id=${{line#*\"id\":}}; echo "{{\"id\": ${{id%%,*}}, \"reward\": 1}}""#,
        path.display()
    );
    let env = ["MODE=fast", "TOKENIZERS_PARALLELISM"].map(EnvVar::parse).to_vec();
    let program = Program { timeout_s: PATIENT_S, env, ..shell(&body) };
    let mut context = RewardContext { environment: environment() };
    for (name, value) in [
        ("HF_TOKEN", "hidden-1"),
        ("WANDB_API_KEY", "hidden-2"),
        ("LOCKSTEP_TOKEN", "hidden-3"),
        ("MY_SECRET", "hidden-4"),
        ("LC_KEY", "hidden-5"),
        ("UNRELATED", "hidden-6"),
        ("LC_ALL", "C.UTF-8"),
        ("TOKENIZERS_PARALLELISM", "false"),
    ] {
        context.environment.push((name.into(), value.into()));
    }
    let mut function = open("checked", &RewardSpec::Program(program), &context).unwrap();
    assert_eq!(score(&mut *function, 1).rewards, [Some(1.0)]);
    let seen = std::fs::read_to_string(path).unwrap();
    for wanted in ["MODE=fast\n", "TOKENIZERS_PARALLELISM=false\n", "LC_ALL=C.UTF-8\n", "PATH="] {
        assert!(seen.contains(wanted), "{wanted}");
    }
    assert!(!seen.contains("hidden"), "{seen}");
    assert!(!seen.contains("CARGO"), "nothing else passes");
}

#[test]
fn a_secret_that_is_named_is_refused() {
    let program = Program { env: vec![EnvVar::parse("HF_TOKEN")], ..shell("true") };
    let error = RewardSpec::Program(program).check("checked").unwrap_err();
    assert!(error.to_string().contains("`env` is `HF_TOKEN`: reward programs get no secrets"), "{error}");
}
