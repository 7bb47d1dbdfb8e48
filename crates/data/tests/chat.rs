//! Chat templates against transformers and TRL: text, tokens and masks, from `goldens/chat`.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use lockstep_core::Fault;
use lockstep_data::{
    Chat, ChatFault, ChatTemplate, DataError, Masks, Moment, RowFault, TemplateSource, Tokenizer,
    TokenizerSource, encode, encode_pair,
};
use proptest::prelude::*;
use serde_json::{Value, json as object};

const COMPLETION: Masks = Masks { completion_only: true, assistant_only: false };
const ASSISTANT: Masks = Masks { completion_only: false, assistant_only: true };
const BOTH: Masks = Masks { completion_only: true, assistant_only: true };

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
    ChatTemplate::load(source, &tokenizer(), Moment::default()).unwrap()
}

fn own(name: &str) -> TemplateSource {
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

/// Where `found` departs from what transformers gives for one conversation.
fn departure(template: &ChatTemplate, tokenizer: &Tokenizer, chat: &Chat, case: &Value) -> Option<String> {
    let prompt = case["prompt"].as_bool().unwrap();
    let text = match template.render(chat, prompt) {
        Ok(text) => text,
        Err(_) if case["error"].is_string() => return None,
        Err(fault) => return Some(format!("failed: {fault}")),
    };
    let Some(expected) = case["text"].as_str() else {
        // The one leniency: null is walked over as an empty list.
        if case["error"].as_str().unwrap().contains("'NoneType' object is not iterable") {
            return None;
        }
        return Some(format!("rendered although transformers says {}: {text:?}", case["error"]));
    };
    if text != expected {
        return Some(format!("\n  is        {text:?}\n  should be {expected:?}"));
    }
    if tokenizer.encode_plain(&text).unwrap() != ids(case) {
        return Some("tokens differ".into());
    }
    if case["mask"].is_array() {
        let supervised = mask(&case["mask"], ids(case).len());
        return match encode(template, tokenizer, chat, ASSISTANT) {
            Ok(found) if found.supervised == supervised => None,
            // transformers loses the end of a character of several tokens at the end of a block.
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

/// Whether `inner` is on only where `outer` is, and `outer` goes on for a few tokens at most.
fn contains(outer: &[bool], inner: &[bool]) -> bool {
    let more = outer.iter().zip(inner).filter(|(outer, inner)| **outer && !**inner).count();
    more <= 8 && outer.iter().zip(inner).all(|(outer, inner)| *outer || !*inner)
}

/// Whether every run of `mask` ends where one of `other` ends, and some begin later.
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
fn text_tokens_and_masks_are_those_of_transformers() {
    let (chats, tokenizer) = (chats(), tokenizer());
    let cases = json(&goldens().join("cases.json"));
    let mut departures = Vec::new();
    for (name, list) in cases["templates"].as_object().unwrap() {
        let template = template(&own(name));
        for case in list.as_array().unwrap() {
            if let Some(what) = departure(&template, &tokenizer, named(&chats, case), case) {
                departures.push(format!("{name} {} {}: {what}", case["chat"], case["prompt"]));
            }
        }
    }
    assert!(departures.is_empty(), "{} departures\n{}", departures.len(), departures.join("\n"));
}

#[test]
fn prompts_and_completions_are_cut_and_masked_as_by_trl() {
    let (chats, tokenizer) = (chats(), tokenizer());
    let cases = json(&goldens().join("cases.json"));
    let mut mismatches = 0;
    for (name, list) in cases["pairs"].as_object().unwrap() {
        let template = template(&own(name));
        for case in list.as_array().unwrap() {
            let mut prompt = named(&chats, case).clone();
            let completion = vec![prompt.messages.pop().unwrap()];
            let encode = |masks| encode_pair(&template, &tokenizer, &prompt, &completion, masks).unwrap();
            let found = encode(COMPLETION);
            let what = format!("{name} {}", case["chat"]);
            assert_eq!(found.tokens, ids(case), "{what}");
            assert_eq!(found.supervised, mask(&case["completion"], found.tokens.len()), "{what}");
            assert_eq!(found.prefix_mismatch, case["mismatch"].as_bool().unwrap(), "{what}");
            let both = encode(BOTH);
            assert_eq!(both.supervised, mask(&case["both"], found.tokens.len()), "{what}");
            assert_eq!(encode(Masks::default()).supervised, vec![true; found.tokens.len()]);
            mismatches += usize::from(found.prefix_mismatch);
        }
    }
    assert!(mismatches > 0, "the goldens should have prompts that are no prefix");
}

/// A template's own tags and the turns found without them agree.
#[test]
fn turns_are_found_where_a_template_does_not_mark_them() {
    let (chats, tokenizer) = (chats(), tokenizer());
    let mut untraceable = Vec::new();
    let mut found = 0;
    for name in ["headers", "dated", "markup", "thoughts", "brackets"] {
        let TemplateSource::Path(path) = own(name) else { unreachable!() };
        let text = fs::read_to_string(path).unwrap();
        let bare = text.replace("% endgeneration", "% endif").replace("%- endgeneration", "%- endif");
        let bare = bare.replace("% generation", "% if true").replace("%- generation", "%- if true");
        let (tagged, bare) = (template(&own(name)), template(&TemplateSource::Inline(bare)));
        // Without thinking, an empty thought is part of the prompt: the tags count it to the turn.
        for (chat_name, chat) in chats.iter().filter(|(chat, _)| chat != "no_thinking") {
            let Ok(expected) = encode(&tagged, &tokenizer, chat, ASSISTANT) else { continue };
            match encode(&bare, &tokenizer, chat, ASSISTANT) {
                Ok(encoded) => assert_eq!(encoded, expected, "{name} {chat_name}"),
                Err(fault) => untraceable.push(format!("{name} {chat_name}: {fault}")),
            }
            found += 1;
        }
    }
    insta::assert_snapshot!(format!("{found} conversations\n{}", untraceable.join("\n")));
}

/// The templates that models have are not ours to keep. `make.py --originals` collects and renders them.
#[test]
fn the_templates_of_models_render_as_in_transformers() {
    let Some(folder) = std::env::var_os("LOCKSTEP_CHAT_ORIGINALS").map(PathBuf::from) else {
        println!("skipped: LOCKSTEP_CHAT_ORIGINALS does not name the output of make.py --originals");
        return;
    };
    let (chats, tokenizer) = (chats(), tokenizer());
    let mut names: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.retain(|path| path.extension().is_some_and(|ext| ext == "jinja"));
    names.sort();
    assert!(!names.is_empty(), "{} has no templates", folder.display());
    let mut departures = Vec::new();
    for path in names {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let template = template(&TemplateSource::Path(path.clone()));
        let cases = json(&path.with_extension("json"));
        let list = cases["templates"][name].as_array().unwrap();
        let (mut same, mut trl, mut like_trl, mut shorter) = (0, 0, 0, 0);
        let mut untraced = Vec::new();
        for case in list {
            let chat = named(&chats, case);
            match departure(&template, &tokenizer, chat, case) {
                Some(what) => departures.push(format!("{name} {} {}: {what}", case["chat"], case["prompt"])),
                None => same += 1,
            }
            if case["prompt"] == false && case["text"].is_string() {
                let found = encode(&template, &tokenizer, chat, ASSISTANT);
                let lost = matches!(found, Err(ChatFault::Untraceable { .. }));
                untraced.extend(lost.then(|| case["chat"].to_string()));
            }
            if case["trl"].as_array().is_some_and(|spans| !spans.is_empty()) {
                let found = encode(&template, &tokenizer, chat, ASSISTANT);
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
    assert!(departures.is_empty(), "{} departures\n{}", departures.len(), departures.join("\n"));
}

#[test]
fn expressions_come_to_what_jinja_makes_of_them() {
    let cases = json(&goldens().join("cases.json"));
    let chat = Chat {
        messages: vec![object!({"role": "user", "content": "hi"})],
        kwargs: cases["variables"].as_object().unwrap().clone(),
        ..Chat::default()
    };
    let mut departures = Vec::new();
    for case in cases["expressions"].as_array().unwrap() {
        let source = TemplateSource::Inline(case["template"].as_str().unwrap().into());
        let rendered = ChatTemplate::load(&source, &tokenizer(), Moment::default())
            .map_err(|e| e.to_string())
            .and_then(|template| template.render(&chat, false).map_err(|e| e.to_string()));
        let same = match &rendered {
            Ok(text) => case["text"] == **text,
            Err(_) => case["error"].is_string(),
        };
        if !same {
            departures.push(format!(
                "{}\n  is        {rendered:?}\n  should be {}{}",
                case["template"], case["text"], case["error"]
            ));
        }
    }
    assert!(departures.is_empty(), "{} departures\n{}", departures.len(), departures.join("\n"));
}

fn user(content: &str) -> Chat {
    Chat { messages: vec![object!({"role": "user", "content": content})], ..Chat::default() }
}

fn talk(turns: &[(&str, &str)]) -> Chat {
    let message = |(role, content): &(&str, &str)| object!({"role": role, "content": content});
    Chat { messages: turns.iter().map(message).collect(), ..Chat::default() }
}

/// The whole report of a fault, hint included, for snapshots.
fn report(error: DataError) -> String {
    match error.hint() {
        Some(hint) => format!("{error}\nhint: {hint}"),
        None => error.to_string(),
    }
}

/// A row's fault as a data set's error reports it.
fn row_report(fault: ChatFault) -> String {
    report(DataError::BadRow { file: "train.jsonl".into(), row: 7, fault: RowFault::Chat(fault) })
}

#[test]
fn messages_about_bad_templates() {
    let bad = [
        ("{% if messages %}\nhello\n", "an unclosed block"),
        ("a\n{{ messages[0].content | shout }}", "an unknown filter"),
        ("a\n\n{{ raise_exception('Only one system message, ' ~ messages | length) }}", "a refusal"),
        (
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
            "a loop without end",
        ),
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
            ChatTemplate::load(&TemplateSource::Inline(text.into()), &tokenizer(), Moment::default());
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
    let tagged = template(&own("markup"));
    let silent = template(&TemplateSource::Inline("{{ messages | length }} said".into()));
    let tokenizer = tokenizer();
    let reserved = object!({"messages": []}).as_object().unwrap().clone();
    let odd = |message: Value| Chat { messages: vec![message], ..Chat::default() };
    let faults = [
        encode(&tagged, &tokenizer, &Chat::default(), ASSISTANT),
        encode(&tagged, &tokenizer, &odd(object!("hello")), ASSISTANT),
        encode(&tagged, &tokenizer, &odd(object!({"from": "human", "value": "x"})), ASSISTANT),
        encode(&tagged, &tokenizer, &Chat { kwargs: reserved, ..user("x") }, ASSISTANT),
        encode(&tagged, &tokenizer, &Chat { tools: Some(object!("[1")), ..user("x") }, ASSISTANT),
        encode(&tagged, &tokenizer, &Chat { tools: Some(object!({"a": 1})), ..user("x") }, ASSISTANT),
        encode(&tagged, &tokenizer, &user("nobody answers"), ASSISTANT),
        encode(&silent, &tokenizer, &talk(&[("user", "a"), ("assistant", "b")]), ASSISTANT),
    ];
    let out: Vec<String> = faults.into_iter().map(|fault| row_report(fault.unwrap_err())).collect();
    insta::assert_snapshot!(out.join("\n\n"));
}

/// A folder with a tokenizer and `files` beside it.
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
fn templates_are_found_as_transformers_finds_them() {
    let render = |files: &[(&str, &str)], tools: bool| {
        let dir = folder(files);
        let tokenizer = Tokenizer::load(&TokenizerSource::File(dir.path().into())).unwrap();
        let chat = Chat { tools: tools.then(|| object!([])), ..user("x") };
        let load = |source: &TemplateSource| ChatTemplate::load(source, &tokenizer, Moment::default());
        let own = load(&TemplateSource::Tokenizer)?;
        let by_path = load(&TemplateSource::Path(dir.path().into()))?;
        assert_eq!(own.fingerprint(), by_path.fingerprint());
        // What a model folder gets is found again there.
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
    // Named templates hide the configuration's, and none of them is the default.
    insta::assert_snapshot!(render(&[named, config], false).unwrap().unwrap_err(), @"chat template DIR/additional_chat_templates/tool_use.jinja: none of them is called `default`; there are tool_use");
    assert!(matches!(render(&[], false), Err(DataError::NoChatTemplate { path: Some(_) })));
    let error = ChatTemplate::load(&TemplateSource::Tokenizer, &byte(), Moment::default()).unwrap_err();
    insta::assert_snapshot!(report(error), @r"
    no chat template comes with the byte tokenizer
    hint: set chat_template to `builtin`, or give one with chat_template_path.
    ");
    let missing = TemplateSource::Path("/nowhere/chat.jinja".into());
    let error = ChatTemplate::load(&missing, &byte(), Moment::default()).unwrap_err();
    insta::assert_snapshot!(report(error), @r"
    no chat template at /nowhere/chat.jinja
    hint: give a Jinja file, or a folder that has chat_template.jinja, with chat_template_path (--chat-template for commands), or take the plain one that is called `builtin`.
    ");
}

fn byte() -> Tokenizer {
    Tokenizer::load(&TokenizerSource::Byte).unwrap()
}

#[test]
fn the_built_in_template_serves_the_byte_tokenizer() {
    let mut tokenizer = byte();
    let template = ChatTemplate::load(&TemplateSource::Builtin, &tokenizer, Moment::default()).unwrap();
    let chat = talk(&[("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello!")]);
    let text = "system: Be kind.\nuser: Hi\nassistant: Hello!<|endoftext|>\n";
    assert_eq!(template.render(&chat, false).unwrap(), text);
    assert_eq!(template.prompt(&user("Hi")).unwrap(), "user: Hi\nassistant: ");
    let encoded = encode(&template, &tokenizer, &chat, ASSISTANT).unwrap();
    let learnt: Vec<u32> =
        encoded.tokens.iter().zip(&encoded.supervised).filter(|(_, on)| **on).map(|(id, _)| *id).collect();
    assert_eq!(tokenizer.decode(&learnt, false).unwrap(), "Hello!<|endoftext|>");
    // The model folder gets it, and finds it again.
    tokenizer.set_chat_template(template.file().unwrap());
    let dir = tempfile::tempdir().unwrap();
    tokenizer.copy_files_to(dir.path()).unwrap();
    let again = Tokenizer::load(&TokenizerSource::File(dir.path().into())).unwrap();
    let again = ChatTemplate::load(&TemplateSource::Tokenizer, &again, Moment::default()).unwrap();
    assert_eq!(again.render(&chat, false).unwrap(), text);
}

#[test]
fn long_conversations_have_fuel_enough() {
    fn shared_between_threads<T: Send + Sync>(_: &T) {}
    let turns: Vec<(&str, &str)> = (0..10_000).flat_map(|_| [("user", "a"), ("assistant", "b")]).collect();
    for name in ["headers", "dated", "markup", "thoughts", "brackets", "spaces"] {
        let template = template(&own(name));
        shared_between_threads(&template);
        template.render(&talk(&turns), true).unwrap();
    }
}

#[test]
fn fingerprints_change_with_what_is_rendered() {
    let load = |text: &str, now: Moment| {
        let template = ChatTemplate::load(&TemplateSource::Inline(text.into()), &tokenizer(), now).unwrap();
        template.fingerprint().to_string()
    };
    let later = Moment { year: 2026, ..Moment::default() };
    assert_eq!(load("a", Moment::default()), load("a", later), "no clock, no difference");
    assert_ne!(load("a", Moment::default()), load("b", Moment::default()));
    let dated = "{{ strftime_now('%Y') }}";
    assert_ne!(load(dated, Moment::default()), load(dated, later));
    let bytes = ChatTemplate::load(&TemplateSource::Inline("a".into()), &byte(), later).unwrap();
    assert_ne!(load("a", later), bytes.fingerprint(), "other special tokens");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_content_survives(
        turns in prop::collection::vec((0..4usize, any::<String>()), 1..5),
        private in "[\u{f0000}-\u{f0005}\u{10fffd}]{0,4}",
    ) {
        let tokenizer = tokenizer();
        let roles = ["user", "assistant", "system", "tool"];
        let turns: Vec<(&str, String)> =
            turns.iter().map(|(role, text)| (roles[*role], format!("{private}{text}"))).collect();
        let borrowed: Vec<(&str, &str)> = turns.iter().map(|(role, text)| (*role, text.as_str())).collect();
        let chat = talk(&borrowed);
        for name in ["headers", "dated", "markup", "thoughts", "brackets", "spaces"] {
            let template = template(&own(name));
            let _ = encode(&template, &tokenizer, &chat, BOTH);
            if name == "markup" && turns.iter().all(|(role, _)| *role != "tool") {
                let text = template.render(&chat, false).unwrap();
                prop_assert!(turns.iter().all(|(_, said)| text.contains(said.as_str())));
                if let Ok(encoded) = encode(&template, &tokenizer, &chat, ASSISTANT) {
                    prop_assert_eq!(&encoded.tokens, &tokenizer.encode_plain(&text).unwrap());
                }
            }
        }
    }
}
