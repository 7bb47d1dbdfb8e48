//! Everything that saving needs is checked before the first step: no run trains a model that it cannot save.

use std::fs;
use std::os::unix::fs::symlink;

use insta::assert_snapshot;

use crate::support::{Folder, RUN};

const TEMPLATES: &str = "model/additional_chat_templates";
const RAG: &str = "{% for m in messages %}{{ m.content }}{% endfor %}";

/// A model folder as transformers writes it when there is more than one chat template.
fn with_templates() -> Folder {
    let folder = Folder::with_model();
    fs::create_dir(folder.path(TEMPLATES)).unwrap();
    folder.write("model/additional_chat_templates/rag.jinja", RAG);
    folder
}

#[test]
fn additional_chat_templates_go_along() {
    let folder = with_templates();
    folder.succeeds(&["train", "run.yaml"]);
    for place in ["out/model", "out/checkpoints/step-2"] {
        assert_eq!(folder.read(&format!("{place}/additional_chat_templates/rag.jinja")), RAG);
    }
    // Resumed, exported, and trained again.
    folder.succeeds(&["train", "run.yaml", "max_steps=3", "resume_from_checkpoint=true"]);
    folder.succeeds(&["export", "out/checkpoints/step-2", "exported"]);
    assert_eq!(folder.read("exported/additional_chat_templates/rag.jinja"), RAG);
    folder.succeeds(&["train", "run.yaml", "model_name_or_path=out/model", "output_dir=again"]);
    assert_eq!(folder.read("again/model/additional_chat_templates/rag.jinja"), RAG);
    // Damage is noticed.
    folder.write("out/checkpoints/step-3/additional_chat_templates/rag.jinja", RAG.to_uppercase());
    let ran =
        folder.run(&["train", "run.yaml", "max_steps=4", "resume_from_checkpoint=out/checkpoints/step-3"]);
    assert!(ran.code == Some(65) && ran.stderr.contains("rag.jinja is corrupt"), "{ran:#?}");
}

#[test]
fn what_cannot_be_saved_is_refused_before_the_first_step() {
    type Damage = fn(&Folder);
    let cases: [(&str, i32, Damage); 11] = [
        ("is not allowed as a file name in a model folder", 65, |f| {
            f.write("model/additional_chat_templates/a:b.jinja", RAG);
        }),
        ("is not allowed as a file name in a model folder", 65, |f| {
            f.write("model/additional_chat_templates/a\nb.jinja", RAG);
        }),
        ("is not valid UTF-8", 65, |f| {
            use std::os::unix::ffi::OsStrExt as _;
            let name = std::ffi::OsStr::from_bytes(b"a\xff.jinja");
            fs::write(f.path(TEMPLATES).join(name), RAG).unwrap();
        }),
        ("folder.jinja is not a regular file", 65, |f| {
            fs::create_dir(f.path("model/additional_chat_templates/folder.jinja")).unwrap();
        }),
        ("gone.jinja: No such file", 66, |f| {
            symlink("nowhere", f.path("model/additional_chat_templates/gone.jinja")).unwrap();
        }),
        ("a tokenizer file may have at most 1.00 MiB", 65, |f| {
            let file = fs::File::create(f.path("model/additional_chat_templates/huge.jinja")).unwrap();
            file.set_len(2 << 20).unwrap();
        }),
        ("more than 64 templates", 65, |f| {
            (0..70).for_each(|i| f.write(&format!("{TEMPLATES}/{i}.jinja"), RAG));
        }),
        ("tokenizer_config.json: No such file", 66, |f| {
            fs::remove_file(f.path("model/tokenizer_config.json")).unwrap();
            symlink("blobs/gone", f.path("model/tokenizer_config.json")).unwrap();
        }),
        ("special_tokens_map.json is not a regular file", 65, |f| {
            fs::create_dir(f.path("model/special_tokens_map.json")).unwrap();
        }),
        ("generation_config.json is not a regular file", 65, |f| {
            fs::remove_file(f.path("model/generation_config.json")).unwrap();
            fs::create_dir(f.path("model/generation_config.json")).unwrap();
        }),
        ("config.json is 1.00 TiB, which exceeds the limit of 16.0 MiB", 65, |f| {
            fs::File::create(f.path("model/config.json")).unwrap().set_len(1 << 40).unwrap();
        }),
    ];
    for (message, code, damage) in cases {
        let folder = with_templates();
        damage(&folder);
        let ran = folder.run(&["train", "run.yaml"]);
        assert_eq!(ran.code, Some(code), "{message}: {ran:#?}");
        assert!(ran.stderr.contains(message), "{message}: {ran:#?}");
        assert!(!ran.stdout.contains("step 1"), "{message}: {ran:#?}");
        assert!(!folder.path("out/model").exists() && !folder.path("out/checkpoints").exists(), "{message}");
    }
}

#[test]
fn something_else_where_checkpoints_go() {
    let folder = Folder::new(RUN);
    fs::create_dir(folder.path("out")).unwrap();
    folder.write("out/checkpoints", "mine");
    folder.train_refused(&[], 65);
    fs::remove_file(folder.path("out/checkpoints")).unwrap();
    symlink("nowhere/at/all", folder.path("out/checkpoints")).unwrap();
    assert_snapshot!(folder.train_refused(&[], 73), @r"
    error: cannot write out/checkpoints: File exists (os error 17)
    hint: output_dir must be a folder, but a file of that name exists.
    ");
    // A run that is refused later leaves no test files behind.
    fs::remove_file(folder.path("out/checkpoints")).unwrap();
    folder.train_refused(&["train_files=nope.jsonl"], 66);
}
