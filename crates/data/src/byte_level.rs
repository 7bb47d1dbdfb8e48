//! The built-in byte tokenizer: one token per byte, and an EOS token.
//!
//! It needs no file, so a run can start without a tokenizer. [`tokenizer_json`] describes the same encoding
//! to the `tokenizers` library, so that an exported model loads in transformers. A test compares the two.

use std::sync::LazyLock;

use serde_json::Value;

/// The EOS token. Wherever this text occurs it is encoded as the token, as the `tokenizers` library does.
pub(crate) const EOS: &str = "<|endoftext|>";
pub(crate) const EOS_ID: u32 = 256;
pub(crate) const VOCAB_SIZE: usize = 257;

/// Appends the ids of `text` to `out`.
pub(crate) fn encode(text: &str, out: &mut Vec<u32>) {
    for (idx, part) in text.split(EOS).enumerate() {
        if idx > 0 {
            out.push(EOS_ID);
        }
        out.extend(part.bytes().map(u32::from));
    }
}

/// The text of `ids`; invalid UTF-8 becomes U+FFFD. Ids outside the vocabulary have no text, as in tokenizer libraries: a
/// model may have more of them than its tokenizer.
pub(crate) fn decode(ids: &[u32], skip_special: bool) -> String {
    let mut bytes = Vec::with_capacity(ids.len());
    for id in ids {
        match u8::try_from(*id) {
            Ok(byte) => bytes.push(byte),
            Err(_) if *id == EOS_ID && !skip_special => bytes.extend(EOS.bytes()),
            Err(_) => {}
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A `tokenizer.json` for this encoding: byte-level BPE without merges and without splitting.
///
/// Written as text rather than built as a map: the bytes are hashed and must not depend on the order of a map.
pub(crate) fn tokenizer_json() -> String {
    let token = |byte: u8| format!("      {}: {byte},\n", Value::from(byte_char(byte).to_string()));
    let vocab: String = (0..=255u8).map(token).collect();
    let byte_level = r#"{
    "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false
  }"#;
    format!(
        r#"{{
  "version": "1.0",
  "truncation": null,
  "padding": null,
  "added_tokens": [{{
    "id": {EOS_ID}, "content": "{EOS}", "single_word": false, "lstrip": false, "rstrip": false,
    "normalized": false, "special": true
  }}],
  "normalizer": null,
  "pre_tokenizer": {byte_level},
  "post_processor": null,
  "decoder": {byte_level},
  "model": {{
    "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
    "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
    "vocab": {{
{vocab}      "{EOS}": {EOS_ID}
    }},
    "merges": []
  }}
}}
"#
    )
}

/// The character that represents a byte in a byte-level vocabulary, as in GPT-2: the byte itself if it is printable,
/// otherwise the next unused character from U+0100 on.
pub(crate) fn byte_char(byte: u8) -> char {
    static TABLE: LazyLock<[char; 256]> = LazyLock::new(|| {
        let prints = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let mut next = 0x100;
        std::array::from_fn(|byte| match byte as u8 {
            byte if prints(byte) => char::from(byte),
            _ => {
                next += 1;
                char::from_u32(next - 1).expect("all code points below U+0200 are characters")
            }
        })
    });
    TABLE[usize::from(byte)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn library() -> tokenizers::Tokenizer {
        tokenizers::Tokenizer::from_bytes(tokenizer_json()).unwrap()
    }

    fn ids(text: &str) -> Vec<u32> {
        let mut out = Vec::new();
        encode(text, &mut out);
        out
    }

    #[test]
    fn the_vocabulary_has_every_byte_and_eos() {
        let vocab = library().get_vocab(true);
        assert_eq!(vocab.len(), VOCAB_SIZE);
        assert_eq!(vocab[EOS], EOS_ID);
        let mut ids: Vec<u32> = vocab.into_values().collect();
        ids.sort_unstable();
        assert_eq!(ids, (0..257).collect::<Vec<_>>());
    }

    proptest! {
        #[test]
        fn the_library_encodes_and_decodes_the_same(
            parts in prop::collection::vec(
                prop_oneof![".*", any::<String>(), Just(EOS.to_string()), Just("<|endof".to_string())],
                0..5,
            ),
        ) {
            let text = parts.concat();
            let library = library();
            let theirs = library.encode_fast(text.as_str(), true).unwrap();
            prop_assert_eq!(theirs.get_ids(), ids(&text));
            prop_assert_eq!(library.decode(theirs.get_ids(), false).unwrap(), text.clone());
            prop_assert_eq!(decode(&ids(&text), false), text);
        }
    }
}
