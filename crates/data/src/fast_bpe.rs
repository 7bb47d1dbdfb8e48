//! A fast path for byte-level BPE tokenizers that split text with one of a few known patterns.
//!
//! The `tokenizers` library tracks the offset of every character, which training does not need, and merges a
//! word anew each time it occurs. This path splits text at the same places and caches the ids of words. A new
//! word goes to the library's own model, so the merges are always the library's. A tokenizer file with
//! anything unexpected gets no fast path, and one that gets it is first checked against the library on a few
//! texts ([`PROBES`]). Property tests compare the two.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use aho_corasick::{AhoCorasick, MatchKind};
use regex::Regex;
use serde::Deserialize;
use serde_json::Value;
use tokenizers::Model as _;

use crate::byte_level;

/// The suffix that all known patterns share: whitespace before a word leaves its last character to the word.
/// It is the only part that needs look-ahead; [`FastBpe::trailing_space_bytes`] implements it.
const TAIL: &str = r"|\s+(?!\S)|\s+";
/// The patterns of GPT-2, Llama 3 and Qwen 2, without their tail.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+";
const LLAMA3: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+";

/// The words that a thread caches in each of two generations, and the longest word that is cached.
const CACHED_WORDS: usize = 1 << 13;
const MAX_CACHED_WORD_BYTES: usize = 64;

/// Texts on which the known patterns differ.
const PROBES: [&str; 4] = [
    "",
    "It's 12345 o'CLOCK,  and we'LL\tgo.\n\n  Then --\r\n x",
    " naïve 水水 ١٢٣٤ \u{a0}\u{2003}é\u{301}!\u{1F980}\u{1F980} \n",
    "trailing   ",
];

#[derive(Debug)]
pub(crate) struct FastBpe {
    words: Regex,
    /// Whitespace that ends in a newline is not split.
    newlines_bind: bool,
    /// Finds all added tokens. Each has an id, or `None` if only the library can handle it.
    added: Option<AhoCorasick>,
    added_ids: Vec<Option<u32>>,
    /// The ids that the post-processor adds before and after a text.
    before: Vec<u32>,
    after: Vec<u32>,
    /// Identifies the tokenizer whose words a thread has cached.
    tokenizer_id: u64,
}

/// The parts of a tokenizer file that decide whether it has a fast path. The vocabulary is left out: as a JSON tree it
/// would take many times the size of the file.
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

/// A thread's cache for the tokenizer that it used last.
struct WordCache {
    tokenizer_id: u64,
    /// A clone per thread: threads that share a regex contend for its scratch space.
    words: Option<Regex>,
    /// Recent words, and those of the generation before. When `young` is full it replaces `old`; frequent words are
    /// moved to `young` before that.
    young: HashMap<Box<str>, Box<[u32]>>,
    old: HashMap<Box<str>, Box<[u32]>>,
}

impl WordCache {
    fn get(&mut self, word: &str) -> Option<&[u32]> {
        if !self.young.contains_key(word) {
            let (word, ids) = self.old.remove_entry(word)?;
            self.keep(word, ids);
        }
        self.young.get(word).map(AsRef::as_ref)
    }

    fn keep(&mut self, word: Box<str>, ids: Box<[u32]>) {
        if self.young.len() >= CACHED_WORDS {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(word, ids);
    }
}

thread_local! {
    static WORD_CACHE: RefCell<WordCache> = RefCell::new(WordCache {
        tokenizer_id: 0, words: None, young: HashMap::new(), old: HashMap::new(),
    });
}

impl FastBpe {
    /// A fast path for the tokenizer in `json`, if it is of a supported kind.
    pub(crate) fn of(json: &[u8], library: &tokenizers::Tokenizer) -> Option<FastBpe> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
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
            tokenizer_id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        };
        let agrees = |text: &str| {
            let slow = library.encode_fast(text, true).ok().map(|encoding| encoding.get_ids().to_vec());
            slow.is_some() && fast.encode(text, library) == slow
        };
        PROBES.into_iter().all(agrees).then_some(fast)
    }

    /// The ids of `text`; `None` if only the library can encode it.
    pub(crate) fn encode(&self, text: &str, library: &tokenizers::Tokenizer) -> Option<Vec<u32>> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 8);
        ids.extend_from_slice(&self.before);
        WORD_CACHE.with_borrow_mut(|cache| {
            if cache.tokenizer_id != self.tokenizer_id {
                (cache.young, cache.old) = (HashMap::new(), HashMap::new());
                (cache.tokenizer_id, cache.words) = (self.tokenizer_id, None);
            }
            let words = cache.words.take().unwrap_or_else(|| self.words.clone());
            let done = self.encode_with_added_tokens(text, &words, library, cache, &mut ids);
            cache.words = Some(words);
            done
        })?;
        ids.extend_from_slice(&self.after);
        Some(ids)
    }

    /// Encodes added tokens, and the text between them.
    fn encode_with_added_tokens(
        &self,
        text: &str,
        words: &Regex,
        library: &tokenizers::Tokenizer,
        cache: &mut WordCache,
        ids: &mut Vec<u32>,
    ) -> Option<()> {
        let mut at = 0;
        for found in self.added.iter().flat_map(|added| added.find_iter(text)) {
            self.encode_plain(&text[at..found.start()], words, library, cache, ids)?;
            ids.push(self.added_ids[found.pattern().as_usize()]?);
            at = found.end();
        }
        self.encode_plain(&text[at..], words, library, cache, ids)
    }

    /// Encodes text without added tokens.
    fn encode_plain(
        &self,
        text: &str,
        words: &Regex,
        library: &tokenizers::Tokenizer,
        cache: &mut WordCache,
        ids: &mut Vec<u32>,
    ) -> Option<()> {
        let mut at = 0;
        while at < text.len() {
            let found = words.find_at(text, at)?;
            if found.start() != at {
                // No alternative matches this character. The known patterns match every character.
                return None;
            }
            let mut end = found.end();
            if end < text.len() {
                end = self.trailing_space_bytes(found.as_str()).map_or(end, |bytes| end - bytes);
            }
            let word = &text[at..end];
            match cache.get(word) {
                Some(known) => ids.extend_from_slice(known),
                None => {
                    let mapped: String = word.bytes().map(byte_level::byte_char).collect();
                    let tokens = library.get_model().tokenize(&mapped).ok()?;
                    let new: Box<[u32]> = tokens.into_iter().map(|token| token.id).collect();
                    ids.extend_from_slice(&new);
                    if word.len() <= MAX_CACHED_WORD_BYTES {
                        cache.keep(word.into(), new);
                    }
                }
            }
            at = end;
        }
        Some(())
    }

    /// The bytes of the last whitespace character of a match, which belongs to the word that follows. A match of a
    /// single whitespace character is kept.
    fn trailing_space_bytes(&self, found: &str) -> Option<usize> {
        let last = found.chars().next_back().filter(|c| c.is_whitespace())?;
        let rest = &found[..found.len() - last.len_utf8()];
        let binds = self.newlines_bind && matches!(last, '\r' | '\n');
        let white = !rest.is_empty() && rest.chars().all(char::is_whitespace);
        (white && !binds).then_some(last.len_utf8())
    }
}

/// The pattern without its tail, if the pre-tokenizer only splits text by a known pattern.
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

/// A matcher of added tokens, and their ids.
fn added(tokens: &Value, library: &tokenizers::Tokenizer) -> Option<(Option<AhoCorasick>, Vec<Option<u32>>)> {
    let tokens: &[Value] = tokens.as_array().map_or(&[], Vec::as_slice);
    let (mut contents, mut ids) = (Vec::new(), Vec::new());
    for token in tokens {
        contents.push(token["content"].as_str().filter(|content| !content.is_empty())?);
        let off = |name: &str| token[name] == false;
        let simple = ["single_word", "lstrip", "rstrip", "normalized"].into_iter().all(off);
        // The library's id, not the file's: where the two differ, the library numbers on from the vocabulary.
        let id = library.token_to_id(token["content"].as_str()?)?;
        ids.push(simple.then_some(id));
    }
    if contents.is_empty() {
        return Some((None, ids));
    }
    let search = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&contents).ok()?;
    Some((Some(search), ids))
}

/// The ids that a post-processor adds before and after a text.
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
            let mut after_text = false;
            for piece in processor["single"].as_array()? {
                if !piece["Sequence"].is_null() {
                    after_text = true;
                    continue;
                }
                let ids = &processor["special_tokens"][piece["SpecialToken"]["id"].as_str()?]["ids"];
                let ids = ids.as_array()?.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()));
                let side = if after_text { &mut all.1 } else { &mut all.0 };
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
            let fast = FastBpe::of(&file, &library).expect("the tokenizer has a fast path");
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
                assert!(text.contains("<|strip|>"), "{text:?} should take the fast path");
            }
        }
    }

    #[test]
    fn words_whitespace_and_added_tokens_match_the_library() {
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
    fn unknown_kinds_have_no_fast_path() {
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
        fn any_text_matches_the_library(text in any::<String>()) {
            assert_same(&text, &ALL);
        }

        #[test]
        fn texts_with_many_boundaries_match_the_library(
            parts in prop::collection::vec(prop::sample::select(vec![
                " ", "  ", "\n", "\r", "\t", "the", "hello", "'s", "'LL", "1", "23", "é", "水", "!", "<|x|>", "<|", "\u{a0}", "ing",
                "<|strip|>", "\u{2003}", "\u{301}",
            ]), 0..30),
        ) {
            assert_same(&parts.concat(), &ALL);
        }
    }
}
