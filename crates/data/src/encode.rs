//! Turns a row into tokens and a loss mask: appends the EOS token to text and masks prompts.

use serde_json::Value;

use crate::doc::{Doc, Mask, SUPERVISED};
use crate::read::RawRow;
use crate::row::{self, Format, Row};
use crate::{Chat, DataError, DataSpec, EncodedChat, RowFault, Tokenizer};

/// Turns conversations into tokens and loss masks.
pub trait EncodeChat: Sync {
    /// A hash of everything besides the tokenizer that tokens and masks depend on.
    fn fingerprint(&self) -> String;

    /// Encodes a whole conversation.
    fn conversation(&self, tokenizer: &Tokenizer, chat: &Chat) -> Result<EncodedChat, RowFault>;

    /// Encodes a prompt and the messages that answer it. With `completion_only` the prompt does not count in the loss.
    fn pair(
        &self,
        tokenizer: &Tokenizer,
        prompt: &Chat,
        completion: &[Value],
        completion_only: bool,
    ) -> Result<EncodedChat, RowFault>;
}

/// Everything that is needed to encode rows.
#[derive(Clone, Copy)]
pub(crate) struct Encoder<'a> {
    pub(crate) spec: &'a DataSpec,
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) chat: Option<&'a dyn EncodeChat>,
}

impl Encoder<'_> {
    pub(crate) fn encode(&self, raw: RawRow) -> Result<(Format, Doc), RowFault> {
        let (format, row) = row::parse(raw.body?, &self.spec.columns, self.chat.is_some())?;
        if self.tokenizer.is_none() && format != Format::Tokens {
            return Err(RowFault::NoTokenizer { format });
        }
        let completion_only = self.spec.completion_only_loss.unwrap_or(true);
        let doc = match row {
            Row::Text(text) => {
                let tokens = self.tokens(&self.with_eos(text))?;
                Doc { tokens, mask: Mask::From(0), prefix_mismatch: false }
            }
            Row::Pair { prompt, completion } => {
                let prompt_ids = self.tokens(&prompt)?;
                let tokens = self.tokens(&self.with_eos(prompt + &completion))?;
                let prefix_mismatch = !tokens.starts_with(&prompt_ids);
                // The completion starts where the two differ: the prompt's last token may merge with its first one.
                let shared = tokens.iter().zip(&prompt_ids).take_while(|(a, b)| a == b).count();
                let mask = Mask::From(if completion_only { shared } else { 0 });
                Doc { tokens, mask, prefix_mismatch }
            }
            Row::Chat(chat) => rendered(self.template(format)?.conversation(self.tokenizer, &chat)?),
            Row::ChatPair { prompt, completion } => {
                let template = self.template(format)?;
                rendered(template.pair(self.tokenizer, &prompt, &completion, completion_only)?)
            }
            Row::Tokens { ids, supervised } => {
                let vocab = self.tokenizer.vocab_size();
                if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
                    return Err(RowFault::IdOutside { id: *id, vocab });
                }
                Doc {
                    tokens: ids,
                    mask: supervised.map_or(Mask::From(0), Mask::Each),
                    prefix_mismatch: false,
                }
            }
        };
        assert!(doc.tokens.iter().all(|id| *id < SUPERVISED), "vocabularies stay below 2^31");
        Ok((format, doc))
    }

    fn template(&self, format: Format) -> Result<&dyn EncodeChat, RowFault> {
        self.chat.ok_or(RowFault::NoTemplate { format })
    }

    fn tokens(&self, text: &str) -> Result<Vec<u32>, RowFault> {
        self.tokenizer.encode(text).map_err(|e| match e {
            DataError::Tokenizer { why, .. } => RowFault::NotEncodable { why },
            other => RowFault::NotEncodable { why: other.to_string() },
        })
    }

    fn with_eos(&self, mut text: String) -> String {
        if let Some(eos) = self.tokenizer.eos_token().filter(|eos| !text.ends_with(eos)) {
            text.push_str(eos);
        }
        text
    }
}

fn rendered(encoded: EncodedChat) -> Doc {
    let EncodedChat { tokens, supervised, prefix_mismatch } = encoded;
    assert_eq!(tokens.len(), supervised.len(), "a mask covers its tokens");
    Doc { tokens, mask: Mask::Each(supervised), prefix_mismatch }
}
