//! Compares chat templates with transformers and TRL: text, tokens and masks from `goldens/chat`.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use lockstep_core::Fault;
use lockstep_data::{
    Chat, ChatFault, ChatTemplate, DataError, DateTime, LossMasks, RowFault, TemplateSource, Tokenizer,
    TokenizerSource, encode_chat, encode_chat_pair,
};
use proptest::prelude::*;
use serde_json::{Value, json as object};

const COMPLETION: LossMasks = LossMasks { completion_only: true, assistant_only: false };
const ASSISTANT: LossMasks = LossMasks { completion_only: false, assistant_only: true };
const BOTH: LossMasks = LossMasks { completion_only: true, assistant_only: true };

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/chat")
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn tokenizer() -> Tokenizer {
    Tokenizer::load(&TokenizerSource::File(goldens().join("tokenizer"))).unwrap()
}

fn template(source: &TemplateSource) -> ChatTemplate {
    ChatTemplate::load(source, &tokenizer(), DateTime::default()).unwrap()
}

/// A template of the goldens.
fn golden_template(name: &str) -> TemplateSource {
    TemplateSource::Path(goldens().join("templates").join(format!("{name}.jinja")))
}

/// The conversations of the goldens by name.
fn chats() -> Vec<(String, Chat)> {
    let cases = json(&goldens().join("cases.json"));
    let chats = json(&goldens().join("conversations.json"));
    let chat = |value: &Value| Chat {
        messages: value["messages"].as_array().unwrap().clone(),
        tools: value["tools"].as_str().map(|name| cases["tools"][name].clone()),
        kwargs: value["kwargs"].as_object().cloned().unwrap_or_default(),
    };
    chats.as_array().unwrap().iter().map(|c| (c["name"].as_str().unwrap().into(), chat(c))).collect()
}

fn named<'a>(chats: &'a [(String, Chat)], case: &Value) -> &'a Chat {
    &chats.iter().find(|(name, _)| case["chat"] == **name).unwrap().1
}

fn ids(case: &Value) -> Vec<u32> {
    case["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn mask(ranges: &Value, len: usize) -> Vec<bool> {
    let mut out = vec![false; len];
    for range in ranges.as_array().unwrap() {
        let at = |idx: usize| range[idx].as_u64().unwrap() as usize;
        out[at(0)..at(1)].fill(true);
    }
    out
}

/// How the result for one conversation differs from transformers, if it does.
fn difference(template: &ChatTemplate, tokenizer: &Tokenizer, chat: &Chat, case: &Value) -> Option<String> {
    let prompt = case["prompt"].as_bool().unwrap();
    let text = match template.render(chat, prompt) {
        Ok(text) => text,
        Err(_) if case["error"].is_string() => return None,
        Err(fault) => return Some(format!("failed: {fault}")),
    };
    let Some(expected) = case["text"].as_str() else {
        // The only known leniency: iterating over null is the same as iterating over an empty list.
        if case["error"].as_str().unwrap().contains("'NoneType' object is not iterable") {
            return None;
        }
        return Some(format!("rendered, although transformers reports {}: {text:?}", case["error"]));
    };
    if text != expected {
        return Some(format!("\n  found    {text:?}\n  expected {expected:?}"));
    }
    if tokenizer.encode_plain(&text).unwrap() != ids(case) {
        return Some("tokens differ".into());
    }
    if case["mask"].is_array() {
        let supervised = mask(&case["mask"], ids(case).len());
        return match encode_chat(template, tokenizer, chat, ASSISTANT) {
            Ok(found) if found.supervised == supervised => None,
            // transformers drops the last tokens of a multi-token character at the end of a block.
            Ok(found)
                if !case["text"].as_str().unwrap().is_ascii() && contains(&found.supervised, &supervised) =>
            {
                None
            }
            Ok(found) => Some(format!("mask differs: {:?}", ranges(&found.supervised))),
            Err(ChatFault::NoAssistantTokens) if !supervised.contains(&true) => None,
            Err(fault) => Some(format!("mask: {fault}")),
        };
    }
    None
}

/// Whether `inner` is set only where `outer` is, and `outer` has at most a few more tokens.
fn contains(outer: &[bool], inner: &[bool]) -> bool {
    let more = outer.iter().zip(inner).filter(|(outer, inner)| **outer && !**inner).count();
    more <= 8 && outer.iter().zip(inner).all(|(outer, inner)| *outer || !*inner)
}

/// Whether every range of `mask` ends where one of `other` ends, and some begin later.
fn later_starts(mask: &[bool], other: &[bool]) -> bool {
    let (ours, others) = (ranges(mask), ranges(other));
    let within = |(a, b): (&Range<usize>, &Range<usize>)| a.end == b.end && a.start >= b.start;
    ours != others && ours.len() == others.len() && ours.iter().zip(&others).all(within)
}

fn ranges(mask: &[bool]) -> Vec<Range<usize>> {
    let mut out: Vec<Range<usize>> = Vec::new();
    for at in (0..mask.len()).filter(|at| mask[*at]) {
        match out.last_mut() {
            Some(last) if last.end == at => last.end += 1,
            _ => out.push(at..at + 1),
        }
    }
    out
}

#[test]
fn text_tokens_and_masks_match_transformers() {
    let (chats, tokenizer) = (chats(), tokenizer());
    let cases = json(&goldens().join("cases.json"));
    let mut differences = Vec::new();
    for (name, list) in cases["templates"].as_object().unwrap() {
        let template = template(&golden_template(name));
        for case in list.as_array().unwrap() {
            if let Some(what) = difference(&template, &tokenizer, named(&chats, case), case) {
                differences.push(format!("{name} {} {}: {what}", case["chat"], case["prompt"]));
            }
        }
    }
    assert!(differences.is_empty(), "{} differences\n{}", differences.len(), differences.join("\n"));
}

#[test]
fn prompts_and_completions_are_split_and_masked_like_trl() {
    let (chats, tokenizer) = (chats(), tokenizer());
    let cases = json(&goldens().join("cases.json"));
    let mut mismatches = 0;
    for (name, list) in cases["pairs"].as_object().unwrap() {
        let template = template(&golden_template(name));
        for case in list.as_array().unwrap() {
            let mut prompt = named(&chats, case).clone();
            let completion = vec![prompt.messages.pop().unwrap()];
            let encode =
                |masks| encode_chat_pair(&template, &tokenizer, &prompt, &completion, masks).unwrap();
            let found = encode(COMPLETION);
            let what = format!("{name} {}", case["chat"]);
            assert_eq!(found.tokens, ids(case), "{what}");
            assert_eq!(found.supervised, mask(&case["completion"], found.tokens.len()), "{what}");
            assert_eq!(found.prefix_mismatch, case["mismatch"].as_bool().unwrap(), "{what}");
            let both = encode(BOTH);
            assert_eq!(both.supervised, mask(&case["both"], found.tokens.len()), "{what}");
            assert_eq!(encode(LossMasks::default()).supervised, vec![true; found.tokens.len()]);
            mismatches += usize::from(found.prefix_mismatch);
        }
    }
    assert!(mismatches > 0, "the goldens should have prompts that are not a prefix");
}

/// The turns that are located without generation blocks are the same as with them.
#[test]
fn turns_are_located_without_generation_blocks() {
    let (chats, tokenizer) = (chats(), tokenizer());
    let mut untraceable = Vec::new();
    let mut found = 0;
    for name in ["headers", "dated", "markup", "thoughts", "brackets"] {
        let TemplateSource::Path(path) = golden_template(name) else { unreachable!() };
        let text = fs::read_to_string(path).unwrap();
        let bare = text.replace("% endgeneration", "% endif").replace("%- endgeneration", "%- endif");
        let bare = bare.replace("% generation", "% if true").replace("%- generation", "%- if true");
        let (tagged, bare) = (template(&golden_template(name)), template(&TemplateSource::Inline(bare)));
        // With thinking disabled, the generation prompt contains an empty reasoning block; the generation block has it
        // inside the turn.
        for (chat_name, chat) in chats.iter().filter(|(chat, _)| chat != "no_thinking") {
            let Ok(expected) = encode_chat(&tagged, &tokenizer, chat, ASSISTANT) else { continue };
            match encode_chat(&bare, &tokenizer, chat, ASSISTANT) {
                Ok(encoded) => assert_eq!(encoded, expected, "{name} {chat_name}"),
                Err(fault) => untraceable.push(format!("{name} {chat_name}: {fault}")),
            }
            found += 1;
        }
    }
    insta::assert_snapshot!(format!("{found} conversations\n{}", untraceable.join("\n")));
}

/// The templates of real models are not part of this repository, for licensing reasons. `make.py --originals` collects
/// and renders them.
#[test]
fn templates_of_real_models_render_like_transformers() {
    let Some(folder) = std::env::var_os("LOCKSTEP_CHAT_ORIGINALS").map(PathBuf::from) else {
        println!("skipped: set LOCKSTEP_CHAT_ORIGINALS to the output folder of make.py --originals");
        return;
    };
    let (chats, tokenizer) = (chats(), tokenizer());
    let mut names: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.retain(|path| path.extension().is_some_and(|ext| ext == "jinja"));
    names.sort();
    assert!(!names.is_empty(), "{} has no templates", folder.display());
    let mut differences = Vec::new();
    for path in names {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let template = template(&TemplateSource::Path(path.clone()));
        let cases = json(&path.with_extension("json"));
        let list = cases["templates"][name].as_array().unwrap();
        let (mut same, mut trl, mut like_trl, mut shorter) = (0, 0, 0, 0);
        let mut untraced = Vec::new();
        for case in list {
            let chat = named(&chats, case);
            match difference(&template, &tokenizer, chat, case) {
                Some(what) => differences.push(format!("{name} {} {}: {what}", case["chat"], case["prompt"])),
                None => same += 1,
            }
            if case["prompt"] == false && case["text"].is_string() {
                let found = encode_chat(&template, &tokenizer, chat, ASSISTANT);
                let lost = matches!(found, Err(ChatFault::Untraceable { .. }));
                untraced.extend(lost.then(|| case["chat"].to_string()));
            }
            if case["trl"].as_array().is_some_and(|spans| !spans.is_empty()) {
                let found = encode_chat(&template, &tokenizer, chat, ASSISTANT);
                let expected = mask(&case["trl"], ids(case).len());
                trl += 1;
                if let Ok(found) = found {
                    like_trl += usize::from(found.supervised == expected);
                    shorter += usize::from(later_starts(&found.supervised, &expected));
                }
            }
        }
        println!(
            "{name}: {same} of {} as transformers; of {trl} masks {like_trl} as TRL, {shorter} begin later; \
             not traced: {}",
            list.len(),
            untraced.join(" ")
        );
    }
    assert!(differences.is_empty(), "{} differences\n{}", differences.len(), differences.join("\n"));
}

#[test]
fn expressions_evaluate_like_jinja() {
    let cases = json(&goldens().join("cases.json"));
    let chat = Chat {
        messages: vec![object!({"role": "user", "content": "hi"})],
        kwargs: cases["variables"].as_object().unwrap().clone(),
        ..Chat::default()
    };
    let mut differences = Vec::new();
    for case in cases["expressions"].as_array().unwrap() {
        let source = TemplateSource::Inline(case["template"].as_str().unwrap().into());
        let rendered = ChatTemplate::load(&source, &tokenizer(), DateTime::default())
            .map_err(|e| e.to_string())
            .and_then(|template| template.render(&chat, false).map_err(|e| e.to_string()));
        let same = match &rendered {
            Ok(text) => case["text"] == **text,
            Err(_) => case["error"].is_string(),
        };
        if !same {
            differences.push(format!(
                "{}\n  found    {rendered:?}\n  expected {}{}",
                case["template"], case["text"], case["error"]
            ));
        }
    }
    assert!(differences.is_empty(), "{} differences\n{}", differences.len(), differences.join("\n"));
}

fn user(content: &str) -> Chat {
    Chat { messages: vec![object!({"role": "user", "content": content})], ..Chat::default() }
}

fn conversation(turns: &[(&str, &str)]) -> Chat {
    let message = |(role, content): &(&str, &str)| object!({"role": role, "content": content});
    Chat { messages: turns.iter().map(message).collect(), ..Chat::default() }
}

/// The message and hint of an error.
fn report(error: DataError) -> String {
    match error.hint() {
        Some(hint) => format!("{error}\nhint: {hint}"),
        None => error.to_string(),
    }
}

/// The message and hint of a row's fault, as preparing a dataset reports it.
fn row_report(fault: ChatFault) -> String {
    report(DataError::BadRow { file: "train.jsonl".into(), row: 7, fault: RowFault::Chat(fault) })
}

#[test]
fn messages_about_bad_templates() {
    let bad = [
        ("{% if messages %}\nhello\n", "an unclosed block"),
        ("a\n{{ messages[0].content | shout }}", "an unknown filter"),
        ("a\n\n{{ raise_exception('Only one system message, ' ~ messages | length) }}", "a refusal"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "an endless loop"),
        ("{{ messages[0].content }}\n{{ messages[0].tool.name }}", "an undefined attribute"),
        ("{{ 'a' + messages[0].missing }}", "an undefined operand"),
        ("{% macro deep(n) %}{{ deep(n + 1) }}{% endmacro %}{{ deep(0) }}", "recursion"),
        ("\n{% generation %}{{ messages[0].content }}", "an unclosed generation block"),
        ("{{ unheard_of() }}", "an unknown function"),
        ("{% include '/etc/passwd' %}", "an include"),
        ("{{ 'x' * 1000000000 }}", "a huge text"),
        ("{{ ''[::-1] }}{{ [][::-1] }}{{ 'ab'[0:5:-1] }}|", "slices that are empty in Python"),
        ("{{ messages | tojson(depth=3) }}", "an unknown argument"),
        ("{{ strftime_now('%Q') }}", "an unknown directive"),
    ];
    let mut out = String::new();
    for (text, what) in bad {
        let loaded =
            ChatTemplate::load(&TemplateSource::Inline(text.into()), &tokenizer(), DateTime::default());
        let answer = match loaded {
            Err(error) => report(error),
            Ok(template) => template.render(&user("hi"), false).map_err(row_report).unwrap_or_else(|e| e),
        };
        out += &format!("# {what}\n{answer}\n\n");
    }
    insta::assert_snapshot!(out);
}

#[test]
fn messages_about_conversations() {
    let tagged = template(&golden_template("markup"));
    let without_content = template(&TemplateSource::Inline("{{ messages | length }} messages".into()));
    let tokenizer = tokenizer();
    let reserved = object!({"messages": []}).as_object().unwrap().clone();
    let odd = |message: Value| Chat { messages: vec![message], ..Chat::default() };
    let faults = [
        encode_chat(&tagged, &tokenizer, &Chat::default(), ASSISTANT),
        encode_chat(&tagged, &tokenizer, &odd(object!("hello")), ASSISTANT),
        encode_chat(&tagged, &tokenizer, &odd(object!({"from": "human", "value": "x"})), ASSISTANT),
        encode_chat(&tagged, &tokenizer, &Chat { kwargs: reserved, ..user("x") }, ASSISTANT),
        encode_chat(&tagged, &tokenizer, &Chat { tools: Some(object!("[1")), ..user("x") }, ASSISTANT),
        encode_chat(&tagged, &tokenizer, &Chat { tools: Some(object!({"a": 1})), ..user("x") }, ASSISTANT),
        encode_chat(&tagged, &tokenizer, &user("nobody answers"), ASSISTANT),
        encode_chat(
            &without_content,
            &tokenizer,
            &conversation(&[("user", "a"), ("assistant", "b")]),
            ASSISTANT,
        ),
    ];
    let out: Vec<String> = faults.into_iter().map(|fault| row_report(fault.unwrap_err())).collect();
    insta::assert_snapshot!(out.join("\n\n"));
}

/// A folder with a tokenizer and `files`.
fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(goldens().join("tokenizer/tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    for (name, content) in files {
        fs::create_dir_all(dir.path().join(name).parent().unwrap()).unwrap();
        fs::write(dir.path().join(name), content).unwrap();
    }
    dir
}

#[test]
fn templates_are_found_like_in_transformers() {
    let render = |files: &[(&str, &str)], tools: bool| {
        let dir = folder(files);
        let tokenizer = Tokenizer::load(&TokenizerSource::File(dir.path().into())).unwrap();
        let chat = Chat { tools: tools.then(|| object!([])), ..user("x") };
        let load = |source: &TemplateSource| ChatTemplate::load(source, &tokenizer, DateTime::default());
        let own = load(&TemplateSource::Tokenizer)?;
        let by_path = load(&TemplateSource::Path(dir.path().into()))?;
        assert_eq!(own.fingerprint(), by_path.fingerprint());
        // A model folder that gets the files has the same template.
        let copy = tempfile::tempdir().unwrap();
        tokenizer.copy_files_to(copy.path()).unwrap();
        let copied = load(&TemplateSource::Path(copy.path().into()))?;
        assert_eq!(own.fingerprint(), copied.fingerprint());
        Ok::<_, DataError>(
            own.render(&chat, false)
                .map_err(|fault| fault.to_string().replace(dir.path().to_str().unwrap(), "DIR")),
        )
    };
    let file = ("chat_template.jinja", "file {{ eos_token }}{{ bos_token }}");
    let named = ("additional_chat_templates/tool_use.jinja", "named");
    let config = (
        "tokenizer_config.json",
        r#"{"chat_template": "config", "eos_token": {"content": "</s>"}, "bos_token": null}"#,
    );
    let list = (
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]}"#,
    );
    let map = ("special_tokens_map.json", r#"{"bos_token": "<s>", "eos_token": "other"}"#);
    assert_eq!(render(&[file, config, map], false).unwrap().unwrap(), "file </s><s>");
    assert_eq!(render(&[config], true).unwrap().unwrap(), "config");
    assert_eq!(render(&[list], false).unwrap().unwrap(), "one");
    assert_eq!(render(&[list], true).unwrap().unwrap(), "two");
    assert_eq!(render(&[file, named, list], true).unwrap().unwrap(), "named");
    assert_eq!(render(&[file, named, list], false).unwrap().unwrap(), "file </s>");
    // Template files take precedence over tokenizer_config.json, and none of them is the default.
    insta::assert_snapshot!(render(&[named, config], false).unwrap().unwrap_err(), @"chat template DIR/additional_chat_templates/tool_use.jinja: there is no template named `default`; found tool_use");
    assert!(matches!(render(&[], false), Err(DataError::NoChatTemplate { path: Some(_) })));
    let error = ChatTemplate::load(&TemplateSource::Tokenizer, &byte(), DateTime::default()).unwrap_err();
    insta::assert_snapshot!(report(error), @r"
    the byte tokenizer has no chat template
    hint: set `chat_template: builtin`, or set chat_template_path to a Jinja template.
    ");
    let missing = TemplateSource::Path("/nowhere/chat.jinja".into());
    let error = ChatTemplate::load(&missing, &byte(), DateTime::default()).unwrap_err();
    insta::assert_snapshot!(report(error), @r"
    no chat template at /nowhere/chat.jinja
    hint: set chat_template_path (on the command line: --chat-template) to a Jinja template or to a folder with a chat_template.jinja, or use `builtin` for the plain template.
    ");
}

fn byte() -> Tokenizer {
    Tokenizer::load(&TokenizerSource::Byte).unwrap()
}

#[test]
fn the_built_in_template_works_with_the_byte_tokenizer() {
    let mut tokenizer = byte();
    let template = ChatTemplate::load(&TemplateSource::Builtin, &tokenizer, DateTime::default()).unwrap();
    let chat = conversation(&[("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello!")]);
    let text = "system: Be kind.\nuser: Hi\nassistant: Hello!<|endoftext|>\n";
    assert_eq!(template.render(&chat, false).unwrap(), text);
    assert_eq!(template.prompt(&user("Hi")).unwrap(), "user: Hi\nassistant: ");
    let encoded = encode_chat(&template, &tokenizer, &chat, ASSISTANT).unwrap();
    let supervised: Vec<u32> =
        encoded.tokens.iter().zip(&encoded.supervised).filter(|(_, on)| **on).map(|(id, _)| *id).collect();
    assert_eq!(tokenizer.decode(&supervised, false).unwrap(), "Hello!<|endoftext|>");
    // The template is written to the model folder and found there.
    tokenizer.set_chat_template(template.file().unwrap());
    let dir = tempfile::tempdir().unwrap();
    tokenizer.copy_files_to(dir.path()).unwrap();
    let loaded = Tokenizer::load(&TokenizerSource::File(dir.path().into())).unwrap();
    let loaded = ChatTemplate::load(&TemplateSource::Tokenizer, &loaded, DateTime::default()).unwrap();
    assert_eq!(loaded.render(&chat, false).unwrap(), text);
}

#[test]
fn long_conversations_stay_within_the_instruction_limit() {
    fn assert_send_and_sync<T: Send + Sync>(_: &T) {}
    let turns: Vec<(&str, &str)> = (0..10_000).flat_map(|_| [("user", "a"), ("assistant", "b")]).collect();
    for name in ["headers", "dated", "markup", "thoughts", "brackets", "spaces"] {
        let template = template(&golden_template(name));
        assert_send_and_sync(&template);
        template.render(&conversation(&turns), true).unwrap();
    }
}

#[test]
fn fingerprints_change_with_the_rendered_text() {
    let load = |text: &str, now: DateTime| {
        let template = ChatTemplate::load(&TemplateSource::Inline(text.into()), &tokenizer(), now).unwrap();
        template.fingerprint().to_string()
    };
    let later = DateTime { year: 2026, ..DateTime::default() };
    assert_eq!(load("a", DateTime::default()), load("a", later), "the template does not use the date");
    assert_ne!(load("a", DateTime::default()), load("b", DateTime::default()));
    let dated = "{{ strftime_now('%Y') }}";
    assert_ne!(load(dated, DateTime::default()), load(dated, later));
    let bytes = ChatTemplate::load(&TemplateSource::Inline("a".into()), &byte(), later).unwrap();
    assert_ne!(load("a", later), bytes.fingerprint(), "other special tokens");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_content_is_rendered_unchanged(
        turns in prop::collection::vec((0..4usize, any::<String>()), 1..5),
        private in "[\u{f0000}-\u{f0005}\u{10fffd}]{0,4}",
    ) {
        let tokenizer = tokenizer();
        let roles = ["user", "assistant", "system", "tool"];
        let turns: Vec<(&str, String)> =
            turns.iter().map(|(role, text)| (roles[*role], format!("{private}{text}"))).collect();
        let borrowed: Vec<(&str, &str)> = turns.iter().map(|(role, text)| (*role, text.as_str())).collect();
        let chat = conversation(&borrowed);
        for name in ["headers", "dated", "markup", "thoughts", "brackets", "spaces"] {
            let template = template(&golden_template(name));
            let _ = encode_chat(&template, &tokenizer, &chat, BOTH);
            if name == "markup" && turns.iter().all(|(role, _)| *role != "tool") {
                let text = template.render(&chat, false).unwrap();
                prop_assert!(turns.iter().all(|(_, content)| text.contains(content.as_str())));
                if let Ok(encoded) = encode_chat(&template, &tokenizer, &chat, ASSISTANT) {
                    prop_assert_eq!(&encoded.tokens, &tokenizer.encode_plain(&text).unwrap());
                }
            }
        }
    }
}
