//! Byte-level BPE by words, for tokenizers whose text is split by one of a few known patterns.
//!
//! The library keeps for every character where it came from, which training never asks, and looks at a
//! word again each time it meets it. Here text is split at the same places, and a word that was met before is
//! looked up; a new one goes to the library's own model, so its merges are never done otherwise. A file that has
//! anything unexpected gets no fast path, and one that has is tried on texts when it is loaded. Tests hold
//! the two against each other.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use aho_corasick::{AhoCorasick, MatchKind};
use regex::Regex;
use serde::Deserialize;
use serde_json::Value;
use tokenizers::Model as _;

use crate::byte_level;

/// The end that all known patterns have: white space before a word leaves its last character to the word.
/// The rest needs no look-ahead.
const TAIL: &str = r"|\s+(?!\S)|\s+";
/// Patterns without their tail: GPT-2's, Llama 3's, Qwen 2's.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+";
const LLAMA3: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+";

/// Words remembered by a thread in each of two generations, and the longest that is.
const REMEMBERED: usize = 1 << 13;
const REMEMBERED_BYTES: usize = 64;

/// Texts that show the difference between patterns.
const PROBES: [&str; 4] = [
    "",
    "It's 12345 o'CLOCK,  and we'LL\tgo.\n\n  Then --\r\n x",
    " naïve 水水 ١٢٣٤ \u{a0}\u{2003}é\u{301}!\u{1F980}\u{1F980} \n",
    "trailing   ",
];

#[derive(Debug)]
pub(crate) struct FastBpe {
    words: Regex,
    /// White space that ends in a newline stays whole.
    newlines_bind: bool,
    /// All added tokens; what stands for each, or `None` for one that the library must treat.
    added: Option<AhoCorasick>,
    added_ids: Vec<Option<u32>>,
    /// What the post-processor puts around a text.
    before: Vec<u32>,
    after: Vec<u32>,
    /// Tells apart what threads remember for one tokenizer and for another.
    number: u64,
}

/// What is asked of a file: all but its vocabulary, of which a tree would take many times the file.
#[derive(Default, Deserialize)]
#[serde(default)]
struct File {
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    added_tokens: Value,
    model: ModelHead,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ModelHead {
    #[serde(rename = "type")]
    kind: String,
    dropout: Value,
}

/// What a thread keeps for the tokenizer it used last.
struct Memory {
    number: u64,
    /// A copy: threads that share one wait for each other.
    words: Option<Regex>,
    /// Words met lately, and those met before them. When the young are many, the old are forgotten: frequent
    /// words are met again in time.
    young: HashMap<Box<str>, Box<[u32]>>,
    old: HashMap<Box<str>, Box<[u32]>>,
}

impl Memory {
    fn get(&mut self, word: &str) -> Option<&[u32]> {
        if !self.young.contains_key(word) {
            let (word, ids) = self.old.remove_entry(word)?;
            self.keep(word, ids);
        }
        self.young.get(word).map(AsRef::as_ref)
    }

    fn keep(&mut self, word: Box<str>, ids: Box<[u32]>) {
        if self.young.len() >= REMEMBERED {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(word, ids);
    }
}

thread_local! {
    static MEMORY: RefCell<Memory> = RefCell::new(Memory {
        number: 0, words: None, young: HashMap::new(), old: HashMap::new(),
    });
}

impl FastBpe {
    /// A fast path for the tokenizer in `json`, if it is of a kind that has one.
    pub(crate) fn of(json: &[u8], library: &tokenizers::Tokenizer) -> Option<FastBpe> {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let file: File = serde_json::from_slice(json).ok()?;
        if file.model.kind != "BPE" || !file.model.dropout.is_null() || !file.normalizer.is_null() {
            return None;
        }
        let pattern = pattern(&file.pre_tokenizer)?;
        let (added, added_ids) = added(&file.added_tokens, library)?;
        let (before, after) = around(&file.post_processor)?;
        let fast = FastBpe {
            words: Regex::new(&format!(r"{pattern}|\s+")).ok()?,
            newlines_bind: pattern.ends_with(r"|\s*[\r\n]+"),
            added,
            added_ids,
            before,
            after,
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
        };
        let agrees = |text: &str| {
            let slow = library.encode_fast(text, true).ok().map(|encoding| encoding.get_ids().to_vec());
            slow.is_some() && fast.encode(text, library) == slow
        };
        PROBES.into_iter().all(agrees).then_some(fast)
    }

    /// The ids of `text`; `None` where only the library can tell.
    pub(crate) fn encode(&self, text: &str, library: &tokenizers::Tokenizer) -> Option<Vec<u32>> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 8);
        ids.extend_from_slice(&self.before);
        MEMORY.with_borrow_mut(|memory| {
            if memory.number != self.number {
                (memory.young, memory.old) = (HashMap::new(), HashMap::new());
                (memory.number, memory.words) = (self.number, None);
            }
            let words = memory.words.take().unwrap_or_else(|| self.words.clone());
            let done = self.parts(text, &words, library, memory, &mut ids);
            memory.words = Some(words);
            done
        })?;
        ids.extend_from_slice(&self.after);
        Some(ids)
    }

    /// Added tokens, and the text between them.
    fn parts(
        &self,
        text: &str,
        words: &Regex,
        library: &tokenizers::Tokenizer,
        memory: &mut Memory,
        ids: &mut Vec<u32>,
    ) -> Option<()> {
        let mut at = 0;
        for found in self.added.iter().flat_map(|added| added.find_iter(text)) {
            self.plain(&text[at..found.start()], words, library, memory, ids)?;
            ids.push(self.added_ids[found.pattern().as_usize()]?);
            at = found.end();
        }
        self.plain(&text[at..], words, library, memory, ids)
    }

    /// Text without added tokens.
    fn plain(
        &self,
        text: &str,
        words: &Regex,
        library: &tokenizers::Tokenizer,
        memory: &mut Memory,
        ids: &mut Vec<u32>,
    ) -> Option<()> {
        let mut at = 0;
        while at < text.len() {
            let found = words.find_at(text, at)?;
            if found.start() != at {
                // A character that no alternative takes: the known patterns have none.
                return None;
            }
            let mut end = found.end();
            if end < text.len() {
                end = self.given_back(found.as_str()).map_or(end, |bytes| end - bytes);
            }
            let word = &text[at..end];
            match memory.get(word) {
                Some(known) => ids.extend_from_slice(known),
                None => {
                    let stood_in: String = word.bytes().map(byte_level::stand_in).collect();
                    let tokens = library.get_model().tokenize(&stood_in).ok()?;
                    let new: Box<[u32]> = tokens.into_iter().map(|token| token.id).collect();
                    ids.extend_from_slice(&new);
                    if word.len() <= REMEMBERED_BYTES {
                        memory.keep(word.into(), new);
                    }
                }
            }
            at = end;
        }
        Some(())
    }

    /// The bytes of the last character of white space, which goes to the word that follows. A single one
    /// stays.
    fn given_back(&self, found: &str) -> Option<usize> {
        let last = found.chars().next_back().filter(|c| c.is_whitespace())?;
        let rest = &found[..found.len() - last.len_utf8()];
        let binds = self.newlines_bind && matches!(last, '\r' | '\n');
        let white = !rest.is_empty() && rest.chars().all(char::is_whitespace);
        (white && !binds).then_some(last.len_utf8())
    }
}

/// The pattern without its tail, where the text is split by it and nothing else is done.
fn pattern(pre_tokenizer: &Value) -> Option<&'static str> {
    let plain = |step: &Value, regex: bool| {
        step["type"] == "ByteLevel"
            && step["add_prefix_space"] == false
            && step["use_regex"].as_bool().unwrap_or(true) == regex
    };
    if plain(pre_tokenizer, true) {
        return Some(GPT2);
    }
    let steps = pre_tokenizer["pretokenizers"].as_array()?;
    let [split, bytes] = &steps[..] else { return None };
    let isolated = split["type"] == "Split" && split["behavior"] == "Isolated" && split["invert"] == false;
    if pre_tokenizer["type"] != "Sequence" || !isolated || !plain(bytes, false) {
        return None;
    }
    let found = split["pattern"]["Regex"].as_str()?.strip_suffix(TAIL)?;
    [GPT2, LLAMA3, QWEN2].into_iter().find(|known| *known == found)
}

/// What finds added tokens, and their ids.
fn added(tokens: &Value, library: &tokenizers::Tokenizer) -> Option<(Option<AhoCorasick>, Vec<Option<u32>>)> {
    let tokens: &[Value] = tokens.as_array().map_or(&[], Vec::as_slice);
    let (mut contents, mut ids) = (Vec::new(), Vec::new());
    for token in tokens {
        contents.push(token["content"].as_str().filter(|content| !content.is_empty())?);
        let off = |name: &str| token[name] == false;
        let simple = ["single_word", "lstrip", "rstrip", "normalized"].into_iter().all(off);
        // Not the file's own id: the library counts on from the vocabulary where the two are apart.
        let id = library.token_to_id(token["content"].as_str()?)?;
        ids.push(simple.then_some(id));
    }
    if contents.is_empty() {
        return Some((None, ids));
    }
    let finder = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&contents).ok()?;
    Some((Some(finder), ids))
}

/// The ids that a post-processor puts before and after a text.
fn around(processor: &Value) -> Option<(Vec<u32>, Vec<u32>)> {
    match processor["type"].as_str() {
        None if processor.is_null() => Some(Default::default()),
        Some("ByteLevel") => Some(Default::default()),
        Some("Sequence") => {
            let mut all = (Vec::new(), Vec::new());
            for step in processor["processors"].as_array()? {
                let (before, after) = around(step)?;
                all.0.splice(0..0, before);
                all.1.extend(after);
            }
            Some(all)
        }
        Some("TemplateProcessing") => {
            let mut all = (Vec::new(), Vec::new());
            let mut passed = false;
            for piece in processor["single"].as_array()? {
                if !piece["Sequence"].is_null() {
                    passed = true;
                    continue;
                }
                let ids = &processor["special_tokens"][piece["SpecialToken"]["id"].as_str()?]["ids"];
                let ids = ids.as_array()?.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()));
                let side = if passed { &mut all.1 } else { &mut all.0 };
                side.extend(ids.collect::<Option<Vec<u32>>>()?);
            }
            Some(all)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;
    use std::sync::LazyLock;

    fn file(pattern: Option<&str>, processor: Value) -> Vec<u8> {
        let mut file: Value = serde_json::from_str(&byte_level::tokenizer_json()).unwrap();
        let merges = ["h e", "l l", "he ll", "Ġ t", "Ġt he", "1 2", "Ċ Ċ", "Ġ Ġ", "i n", "in g"];
        for (n, merge) in merges.iter().enumerate() {
            file["model"]["vocab"][merge.replace(' ', "")] = (257 + n).into();
        }
        file["model"]["merges"] = json!(merges);
        file["added_tokens"].as_array_mut().unwrap().extend([
            json!({ "id": 300, "content": "<|x|>", "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true }),
            json!({ "id": 301, "content": "<|strip|>", "single_word": false, "lstrip": true, "rstrip": true,
                    "normalized": false, "special": true }),
        ]);
        let bytes = |regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex });
        file["pre_tokenizer"] = match pattern {
            None => bytes(true),
            Some(pattern) => {
                let regex = json!({ "Regex": format!("{pattern}{TAIL}") });
                let split =
                    json!({ "type": "Split", "pattern": regex, "behavior": "Isolated", "invert": false });
                json!({ "type": "Sequence", "pretokenizers": [split, bytes(false)] })
            }
        };
        file["post_processor"] = processor;
        file.to_string().into_bytes()
    }

    fn begin() -> Value {
        json!({ "type": "TemplateProcessing",
                "single": [{ "SpecialToken": { "id": "<|x|>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
                "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
                "special_tokens": { "<|x|>": { "id": "<|x|>", "ids": [300], "tokens": ["<|x|>"] } } })
    }

    static ALL: LazyLock<Vec<(tokenizers::Tokenizer, FastBpe)>> = LazyLock::new(all);

    fn all() -> Vec<(tokenizers::Tokenizer, FastBpe)> {
        let files = [
            file(None, Value::Null),
            file(Some(GPT2), begin()),
            file(
                Some(LLAMA3),
                json!({ "type": "Sequence", "processors": [
                { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true }, begin()] }),
            ),
            file(Some(QWEN2), Value::Null),
        ];
        let load = |file: Vec<u8>| {
            let library = tokenizers::Tokenizer::from_bytes(&file).unwrap();
            let fast = FastBpe::of(&file, &library).expect("a kind that is known");
            (library, fast)
        };
        files.into_iter().map(load).collect()
    }

    fn assert_same(text: &str, all: &[(tokenizers::Tokenizer, FastBpe)]) {
        for (library, fast) in all {
            let slow = library.encode_fast(text, true).unwrap().get_ids().to_vec();
            if let Some(fast) = fast.encode(text, library) {
                assert_eq!(fast, slow, "{text:?}");
            } else {
                assert!(text.contains("<|strip|>"), "{text:?} needs no library");
            }
        }
    }

    #[test]
    fn words_white_space_and_added_tokens() {
        let all = &*ALL;
        for text in [
            "hello the  the   the\n\n\n the",
            "  lead",
            "\n\n",
            " \n ",
            "a\r\n\r\nb",
            "\u{2028}\u{2029}x \u{85}y",
            "12 123 1234",
            "<|x|>the<|endoftext|>",
            "<|x|> <|x|>",
            "a <|strip|> b",
            "<|x",
            "'S 's 'll'LL",
            "\u{1c}\u{1d} a\u{1f}b",
            "\u{feff}a",
        ] {
            assert_same(text, all);
        }
        let (library, fast) = &all[0];
        assert_eq!(fast.encode("a<|strip|>b", library), None);
    }

    #[test]
    fn what_is_not_known_has_no_fast_path() {
        let none = |change: &dyn Fn(&mut Value)| {
            let mut file: Value = serde_json::from_slice(&file(None, Value::Null)).unwrap();
            change(&mut file);
            let bytes = file.to_string().into_bytes();
            let library = tokenizers::Tokenizer::from_bytes(&bytes).unwrap();
            FastBpe::of(&bytes, &library).is_none()
        };
        assert!(none(&|file| file["normalizer"] = json!({ "type": "NFC" })));
        assert!(none(&|file| file["pre_tokenizer"]["add_prefix_space"] = true.into()));
        assert!(none(&|file| file["pre_tokenizer"] = json!({ "type": "Whitespace" })));
        assert!(none(&|file| file["model"]["dropout"] = 0.5.into()));
        assert!(!none(&|_| {}));
    }

    proptest! {
        #[test]
        fn the_library_agrees_on_any_text(text in any::<String>()) {
            assert_same(&text, &ALL);
        }

        #[test]
        fn the_library_agrees_on_texts_of_many_borders(
            parts in prop::collection::vec(prop::sample::select(vec![
                " ", "  ", "\n", "\r", "\t", "the", "hello", "'s", "'LL", "1", "23", "é", "水", "!", "<|x|>", "<|", "\u{a0}", "ing",
                "<|strip|>", "\u{2003}", "\u{301}",
            ]), 0..30),
        ) {
            assert_same(&parts.concat(), &ALL);
        }
    }
}
