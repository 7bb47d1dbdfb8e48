//! Tokenizers: the built-in byte tokenizer, or any `tokenizer.json`.
//!
//! A tokenizer keeps the files it was loaded from, so that a model folder gets the same bytes and a
//! checkpoint can record their hash. Encoding adds the tokens of the file's post-processor (a BOS token for
//! LLaMA), as transformers does. Not supported: `tokenizer.model` (SentencePiece) without a `tokenizer.json`,
//! and slow Python tokenizers.

use std::fs;
use std::io::{self, Read as _};
use std::ops::Range;
use std::path::{Path, PathBuf};

use lockstep_core::Bytes;
use serde_json::{Value, json};

use crate::chat::additional;
use crate::fast_bpe::FastBpe;
use crate::{DataError, byte_level};

/// Where a tokenizer is loaded from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerSource {
    /// One token per byte; needs no file.
    Byte,
    /// A `tokenizer.json`, or a folder that contains one.
    File(PathBuf),
}

const MAIN: &str = "tokenizer.json";
pub(crate) const CONFIG: &str = "tokenizer_config.json";
const SPECIALS: &str = "special_tokens_map.json";
pub(crate) const TEMPLATE: &str = "chat_template.jinja";
/// The folder of named chat templates.
pub(crate) const TEMPLATE_DIR: &str = "additional_chat_templates";
/// Files next to `tokenizer.json` that belong to the tokenizer.
const COMPANION_FILES: [&str; 3] = [CONFIG, SPECIALS, TEMPLATE];
/// The names of special tokens, in files and in chat templates.
const SPECIAL_NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
const FILE_CAP: Bytes = Bytes(256 << 20);
/// Chat templates are written by hand and are far smaller than other tokenizer files.
const TEMPLATE_CAP: Bytes = Bytes(1 << 20);
/// Tokens to try as EOS if the tokenizer's files do not name one, most specific first.
const KNOWN_EOS: [&str; 6] =
    ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>"];

/// A loaded tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    kind: TokenizerKind,
    eos: Option<(u32, String)>,
    vocab_size: usize,
    fingerprint: String,
    /// Name and content of every file that a model folder needs.
    files: Vec<(String, Vec<u8>)>,
    /// The folder of the files; `None` for the byte tokenizer.
    folder: Option<PathBuf>,
    /// Name and text of every special token that the files define.
    special_tokens: Vec<(String, String)>,
}

#[derive(Debug)]
enum TokenizerKind {
    /// There is no tokenizer: rows are token ids.
    None,
    Byte,
    Library {
        library: Box<tokenizers::Tokenizer>,
        fast: Option<Box<FastBpe>>,
    },
}

impl Tokenizer {
    pub fn load(source: &TokenizerSource) -> Result<Self, DataError> {
        match source {
            TokenizerSource::Byte => Ok(Self::byte()),
            TokenizerSource::File(path) => Self::from_path(path),
        }
    }

    /// A placeholder for datasets whose rows are token ids below `vocab_size`: it has no files and cannot encode text.
    pub fn none(vocab_size: usize) -> Self {
        let hash = blake3::hash(format!("token ids below {vocab_size}").as_bytes());
        Tokenizer {
            kind: TokenizerKind::None,
            eos: None,
            vocab_size,
            fingerprint: hash.to_hex().to_string(),
            files: Vec::new(),
            folder: None,
            special_tokens: Vec::new(),
        }
    }

    /// Whether this is [`Tokenizer::none`].
    pub fn is_none(&self) -> bool {
        matches!(self.kind, TokenizerKind::None)
    }

    fn byte() -> Self {
        let main = byte_level::tokenizer_json().into_bytes();
        let eos = (byte_level::EOS_ID, byte_level::EOS.to_string());
        Tokenizer {
            kind: TokenizerKind::Byte,
            vocab_size: byte_level::VOCAB_SIZE,
            fingerprint: fingerprint(&main, Some(&eos)),
            files: vec![(MAIN.into(), main), (CONFIG.into(), config_json(Some(&eos)))],
            folder: None,
            special_tokens: vec![("eos_token".into(), eos.1.clone())],
            eos: Some(eos),
        }
    }

    fn from_path(path: &Path) -> Result<Self, DataError> {
        let path = locate(path)?;
        let folder = path.parent().unwrap_or(Path::new("."));
        let main = read(&path)?.ok_or_else(|| DataError::TokenizerMissing { path: path.clone() })?;
        let malformed = |why: String| DataError::TokenizerMalformed { path: path.clone(), why };
        let mut library = tokenizers::Tokenizer::from_bytes(&main).map_err(|e| malformed(e.to_string()))?;
        // Files may enable truncation and padding; lengths are handled by this crate.
        library.with_padding(None);
        library.with_truncation(None).map_err(|e| malformed(e.to_string()))?;
        let vocab_size = match library.get_vocab(true).values().max() {
            Some(id) => *id as usize + 1,
            None => return Err(malformed("the vocabulary is empty".into())),
        };
        let eos = find_eos(&library, folder)?;
        let fingerprint = fingerprint(&main, eos.as_ref());
        let fast = FastBpe::of(&main, &library).map(Box::new);
        let mut files = vec![(MAIN.to_string(), main)];
        files.extend(companion_files(folder)?);
        if !files.iter().any(|(name, _)| name == CONFIG) {
            files.push((CONFIG.into(), config_json(eos.as_ref())));
        }
        Ok(Tokenizer {
            kind: TokenizerKind::Library { library: Box::new(library), fast },
            special_tokens: special_tokens(folder, eos.as_ref())?,
            eos,
            vocab_size,
            fingerprint,
            files,
            folder: Some(folder.into()),
        })
    }

    /// The ids of `text`, with the tokens that the tokenizer's post-processor adds.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        self.ids(text, true)
    }

    /// The ids of `text` without added tokens; special tokens that are written in the text are recognized.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, DataError> {
        self.ids(text, false)
    }

    fn ids(&self, text: &str, add_special: bool) -> Result<Vec<u32>, DataError> {
        match &self.kind {
            TokenizerKind::None => Err(no_tokenizer()),
            TokenizerKind::Byte => {
                let mut ids = Vec::with_capacity(text.len());
                byte_level::encode(text, &mut ids);
                Ok(ids)
            }
            TokenizerKind::Library { library, fast } => {
                let fast = fast.as_ref().filter(|_| add_special);
                if let Some(ids) = fast.and_then(|fast| fast.encode(text, library)) {
                    return Ok(ids);
                }
                match library.encode_fast(text, add_special) {
                    Ok(encoding) => Ok(encoding.get_ids().to_vec()),
                    Err(e) => Err(DataError::Tokenizer { action: "encode", why: e.to_string() }),
                }
            }
        }
    }

    /// Like [`Tokenizer::encode_plain`], with the byte range of `text` for each id. If several tokens share a
    /// character, each may have the range of the whole character.
    pub fn encode_with_offsets(&self, text: &str) -> Result<(Vec<u32>, Vec<Range<usize>>), DataError> {
        match &self.kind {
            TokenizerKind::None => Err(no_tokenizer()),
            TokenizerKind::Byte => {
                let ids = self.ids(text, false)?;
                let mut end = 0;
                let offsets = ids.iter().map(|id| {
                    let start = end;
                    end += if *id == byte_level::EOS_ID { byte_level::EOS.len() } else { 1 };
                    start..end
                });
                let offsets = offsets.collect();
                Ok((ids, offsets))
            }
            TokenizerKind::Library { library, .. } => match library.encode(text, false) {
                Ok(encoding) => {
                    let offsets = encoding.get_offsets().iter().map(|(start, end)| *start..*end).collect();
                    Ok((encoding.get_ids().to_vec(), offsets))
                }
                Err(e) => Err(DataError::Tokenizer { action: "encode", why: e.to_string() }),
            },
        }
    }

    /// The text of `ids`, with or without special tokens. Ids outside the vocabulary have no text. Without a tokenizer,
    /// the ids as numbers.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, DataError> {
        let error = |why| DataError::Tokenizer { action: "decode", why };
        match &self.kind {
            TokenizerKind::None => Ok(ids.iter().map(|id| format!("{id} ")).collect()),
            TokenizerKind::Byte => Ok(byte_level::decode(ids, skip_special)),
            TokenizerKind::Library { library, .. } => {
                library.decode(ids, skip_special).map_err(|e| error(e.to_string()))
            }
        }
    }

    /// The memory that each encoding thread needs: cached words and the scratch space of regexes. Measured, for each
    /// of two threads, as the peak memory of preparing data minus that of a run that finds it prepared.
    pub(crate) fn thread_bytes(&self) -> Bytes {
        match &self.kind {
            TokenizerKind::None | TokenizerKind::Byte => Bytes::ZERO,
            TokenizerKind::Library { .. } => Bytes(6 << 20),
        }
    }

    /// The largest id plus one, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id of the EOS token, if the tokenizer has one.
    pub fn eos_id(&self) -> Option<u32> {
        self.eos.as_ref().map(|(id, _)| *id)
    }

    /// The text of [`Tokenizer::eos_id`].
    pub fn eos_token(&self) -> Option<&str> {
        self.eos.as_ref().map(|(_, token)| token.as_str())
    }

    /// BLAKE3, in hex, of `tokenizer.json` and the EOS id: everything that the tokens of a text depend on.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Name (such as `bos_token`) and text of the special tokens that the files define.
    pub fn special_tokens(&self) -> &[(String, String)] {
        &self.special_tokens
    }

    /// The folder of the files; `None` for the byte tokenizer.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Sets the chat template that is written to the model folder.
    pub fn set_chat_template(&mut self, text: &str) {
        self.files.retain(|(name, _)| name != TEMPLATE);
        self.files.push((TEMPLATE.into(), text.into()));
    }

    /// Name and content of the files that a model folder needs.
    pub fn files(&self) -> &[(String, Vec<u8>)] {
        &self.files
    }

    /// Writes [`Tokenizer::files`] into `dir`, which must exist.
    pub fn copy_files_to(&self, dir: &Path) -> Result<(), DataError> {
        for (name, content) in &self.files {
            let path = dir.join(name);
            let templates = dir.join(TEMPLATE_DIR);
            let created = if path.starts_with(&templates) { fs::create_dir(&templates) } else { Ok(()) };
            let created = created.or_else(|e| if templates.is_dir() { Ok(()) } else { Err(e) });
            let written = created.and_then(|()| fs::write(&path, content));
            written.map_err(|source| DataError::Write { path, source })?;
        }
        Ok(())
    }
}

fn no_tokenizer() -> DataError {
    DataError::Tokenizer {
        action: "encode",
        why: "there is no tokenizer, because the data consists of token ids".into(),
    }
}

/// The `tokenizer.json` at `path`, which is the file or its folder.
fn locate(path: &Path) -> Result<PathBuf, DataError> {
    if !path.is_dir() {
        return Ok(path.into());
    }
    let file = path.join(MAIN);
    if file.exists() {
        return Ok(file);
    }
    let others = ["tokenizer.model", "vocab.json", "spiece.model", "tekken.json"];
    let found = others.into_iter().filter(|name| path.join(name).exists()).map(str::to_string).collect();
    Err(DataError::TokenizerNotInFolder { folder: path.into(), found })
}

/// Name and content of the tokenizer files in `folder`, without `tokenizer.json`.
pub(crate) fn companion_files(folder: &Path) -> Result<Vec<(String, Vec<u8>)>, DataError> {
    let names = COMPANION_FILES.map(str::to_string).into_iter().chain(additional(folder)?);
    let mut files = Vec::new();
    for name in names {
        if let Some(content) = read(&folder.join(&name))? {
            files.push((name, content));
        }
    }
    Ok(files)
}

/// Reads a whole file; `None` if it does not exist. A dangling link is an error, because a file was intended.
pub(crate) fn read(path: &Path) -> Result<Option<Vec<u8>>, DataError> {
    let error = |source| DataError::Read { path: path.into(), source };
    let found = match path.metadata() {
        Ok(found) => found,
        Err(e) if e.kind() == io::ErrorKind::NotFound && !path.is_symlink() => return Ok(None),
        Err(e) => return Err(error(e)),
    };
    if !found.is_file() {
        return Err(DataError::NotAFile { path: path.into() });
    }
    let is_template = path.extension().is_some_and(|ending| ending == "jinja");
    let cap = if is_template { TEMPLATE_CAP } else { FILE_CAP };
    let too_large = |size| DataError::TokenizerTooLarge { path: path.into(), size: Bytes(size), cap };
    if found.len() > cap.0 {
        return Err(too_large(found.len()));
    }
    // The file may grow while it is read, so the limit is enforced again.
    let mut bytes = Vec::with_capacity(found.len() as usize);
    let file = fs::File::open(path).map_err(error)?;
    file.take(cap.0 + 1).read_to_end(&mut bytes).map_err(error)?;
    if bytes.len() as u64 > cap.0 {
        return Err(too_large(bytes.len() as u64));
    }
    Ok(Some(bytes))
}

/// The EOS token: the one that the tokenizer's files name, otherwise a well-known one. A name that is not in the
/// vocabulary is ignored.
fn find_eos(library: &tokenizers::Tokenizer, folder: &Path) -> Result<Option<(u32, String)>, DataError> {
    let by_name = |name: &str| library.token_to_id(name).map(|id| (id, name.to_string()));
    for file in [CONFIG, SPECIALS] {
        let value = read_json(&folder.join(file))?;
        if let Some(eos) = token_text(&value["eos_token"]).and_then(by_name) {
            return Ok(Some(eos));
        }
    }
    for file in ["generation_config.json", "config.json"] {
        let value = read_json(&folder.join(file))?;
        let entry = &value["eos_token_id"];
        let id = entry.as_u64().or_else(|| entry[0].as_u64()).and_then(|id| u32::try_from(id).ok());
        if let Some(eos) = id.and_then(|id| Some((id, library.id_to_token(id)?))) {
            return Ok(Some(eos));
        }
    }
    Ok(KNOWN_EOS.into_iter().find_map(by_name))
}

/// The special tokens that the files define; EOS falls back to the one that was found without them.
fn special_tokens(folder: &Path, eos: Option<&(u32, String)>) -> Result<Vec<(String, String)>, DataError> {
    let (config, map) = (read_json(&folder.join(CONFIG))?, read_json(&folder.join(SPECIALS))?);
    let named = |name: &str| token_text(&config[name]).or_else(|| token_text(&map[name]));
    let found = SPECIAL_NAMES.into_iter().filter_map(|name| {
        let fallback = eos.filter(|_| name == "eos_token").map(|(_, token)| token.as_str());
        Some((name.to_string(), named(name).or(fallback)?.to_string()))
    });
    Ok(found.collect())
}

/// The text of a token entry, which is a string or an object with `content`.
fn token_text(entry: &Value) -> Option<&str> {
    entry.as_str().or_else(|| entry["content"].as_str())
}

/// The JSON in `path`; null if the file does not exist.
fn read_json(path: &Path) -> Result<Value, DataError> {
    let Some(bytes) = read(path)? else { return Ok(Value::Null) };
    serde_json::from_slice(&bytes)
        .map_err(|e| DataError::TokenizerMalformed { path: path.into(), why: e.to_string() })
}

/// The smallest `tokenizer_config.json` with which transformers loads a `tokenizer.json`.
fn config_json(eos: Option<&(u32, String)>) -> Vec<u8> {
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos.map(|(_, token)| token),
        "clean_up_tokenization_spaces": false,
    });
    format!("{config:#}\n").into_bytes()
}

fn fingerprint(main: &[u8], eos: Option<&(u32, String)>) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(main);
    hasher.update(&eos.map_or(u64::MAX, |(id, _)| u64::from(*id)).to_le_bytes());
    hasher.finalize().to_hex().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_tokenizer_round_trips_through_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let byte = Tokenizer::load(&TokenizerSource::Byte).unwrap();
        byte.copy_files_to(dir.path()).unwrap();
        let loaded = Tokenizer::load(&TokenizerSource::File(dir.path().into())).unwrap();
        let text = "naïve 水 <|endoftext|>\n\0";
        assert_eq!(loaded.encode(text).unwrap(), byte.encode(text).unwrap());
        assert_eq!(loaded.decode(&byte.encode(text).unwrap(), false).unwrap(), text);
        assert_eq!(loaded.decode(&byte.encode(text).unwrap(), true).unwrap(), "naïve 水 \n\0");
        assert_eq!(loaded.vocab_size(), 257);
        assert_eq!(loaded.eos_id(), Some(256));
        assert_eq!(loaded.fingerprint(), byte.fingerprint());
        assert_eq!(loaded.files(), byte.files());
    }

    #[test]
    fn the_eos_token_comes_from_the_files() {
        let dir = tempfile::tempdir().unwrap();
        let byte = Tokenizer::load(&TokenizerSource::Byte).unwrap();
        let eos = |name: &str, content: &str| {
            for (file, content) in byte.files().iter().filter(|(file, _)| file == MAIN) {
                fs::write(dir.path().join(file), content).unwrap();
            }
            let path = dir.path().join(name);
            fs::write(&path, content).unwrap();
            let loaded = Tokenizer::load(&TokenizerSource::File(dir.path().join(MAIN))).unwrap();
            fs::remove_file(path).unwrap();
            loaded.eos_id()
        };
        assert_eq!(eos(CONFIG, r#"{"eos_token": "A"}"#), Some(65));
        assert_eq!(eos(CONFIG, r#"{"eos_token": {"content": "B"}}"#), Some(66));
        assert_eq!(eos("special_tokens_map.json", r#"{"eos_token": "C"}"#), Some(67));
        assert_eq!(eos("config.json", r#"{"eos_token_id": [68, 1]}"#), Some(68));
        assert_eq!(eos(CONFIG, r#"{"eos_token": "not there"}"#), Some(256));
    }
}
