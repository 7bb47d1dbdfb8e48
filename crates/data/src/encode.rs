//! Turns a row into tokens and a loss mask: appends the EOS token to text and masks prompts.

use serde_json::Value;

use crate::doc::{Doc, Mask, SUPERVISED, Sample};
use crate::preference::PreferenceSides;
use crate::read::{Body, Named, RawRow};
use crate::row::{self, Format, Row};
use crate::{Chat, DataError, DataSpec, DataTask, EncodedChat, PreferenceLayout, RowFault, Tokenizer};

/// Turns conversations into tokens and loss masks.
pub trait EncodeChat: Sync {
    /// A hash of everything besides the tokenizer that tokens and masks depend on.
    fn fingerprint(&self) -> String;

    /// Encodes a whole conversation.
    fn conversation(&self, tokenizer: &Tokenizer, chat: &Chat) -> Result<EncodedChat, RowFault>;

    /// Encodes a conversation that the model continues, with the generation prompt at its end.
    fn prompt(&self, tokenizer: &Tokenizer, chat: &Chat) -> Result<Vec<u32>, RowFault>;

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
    pub(crate) fn encode(&self, raw: RawRow) -> Result<(Format, Sample), RowFault> {
        let (body, task) = (raw.body?, self.spec.task);
        let columns = if let DataTask::Prompt { .. } = task { json_text(&body)? } else { String::new() };
        let (format, row) = row::parse(body, &self.spec.columns, task, self.chat.is_some())?;
        if self.tokenizer.is_none() && !format.is_tokens() {
            return Err(RowFault::NoTokenizer { format });
        }
        let sample = match row {
            Row::Preference(row) => {
                let docs = match task {
                    DataTask::Preference(PreferenceLayout::Sequence) => self.sequences(format, row.sides)?,
                    _ => self.completions(format, row.sides)?,
                };
                Sample::Pair { docs: Box::new(docs), margin: row.margin }
            }
            Row::Prompt(text) => Sample::Prompt { tokens: self.tokens(&text)?, columns },
            Row::ChatPrompt(chat) => {
                Sample::Prompt { tokens: self.template(format)?.prompt(self.tokenizer, &chat)?, columns }
            }
            document => Sample::Document(self.document(format, document)?),
        };
        let is_valid = |tokens: &[u32]| tokens.iter().all(|id| *id < SUPERVISED);
        assert!(
            match &sample {
                Sample::Document(doc) => is_valid(&doc.tokens),
                Sample::Pair { docs, .. } => docs.iter().all(|doc| is_valid(&doc.tokens)),
                Sample::Prompt { tokens, .. } => is_valid(tokens),
            },
            "vocabularies stay below 2^31"
        );
        Ok((format, sample))
    }

    fn document(&self, format: Format, row: Row) -> Result<Doc, RowFault> {
        let completion_only = self.spec.completion_only_loss.unwrap_or(true);
        Ok(match row {
            Row::Text(text) => {
                let tokens = self.tokens(&self.with_eos(text))?;
                Doc { tokens, mask: Mask::From(0), prefix_mismatch: false }
            }
            Row::Pair { prompt, completion } => {
                let prompt_ids = self.tokens(&prompt)?;
                let tokens = self.tokens(&self.with_eos(prompt + &completion))?;
                // The completion starts where the two differ: the prompt's last token may merge with its first one.
                let shared = num_shared(&prompt_ids, &tokens);
                let mask = Mask::From(if completion_only { shared } else { 0 });
                Doc { tokens, mask, prefix_mismatch: shared < prompt_ids.len() }
            }
            Row::Chat(chat) => rendered(self.template(format)?.conversation(self.tokenizer, &chat)?),
            Row::ChatPair { prompt, completion } => {
                let template = self.template(format)?;
                rendered(template.pair(self.tokenizer, &prompt, &completion, completion_only)?)
            }
            Row::Tokens { ids, supervised } => {
                let mask = supervised.map_or(Mask::From(0), Mask::Each);
                Doc { tokens: self.in_vocabulary(ids)?, mask, prefix_mismatch: false }
            }
            Row::Preference(_) | Row::Prompt(_) | Row::ChatPrompt(_) => unreachable!("rows of other tasks"),
        })
    }

    /// The two documents of a pair, with the tokens of the completions as targets. Both completions start at the same
    /// index: where the prompt, tokenized alone, first differs from one of the documents, as in TRL.
    fn completions(&self, format: Format, sides: PreferenceSides) -> Result<[Doc; 2], RowFault> {
        let (prompt_ids, docs) = match &sides {
            PreferenceSides::Text { prompt, .. } => (self.tokens(prompt)?, self.whole(format, sides)?),
            PreferenceSides::Chat { prompt, .. } => {
                let prompt_ids = self.template(format)?.prompt(self.tokenizer, prompt)?;
                (prompt_ids, self.whole(format, sides)?)
            }
            PreferenceSides::Tokens { .. } => unreachable!("token ids are for sequences only"),
        };
        let shared = |doc: &Doc| num_shared(&prompt_ids, &doc.tokens);
        let start = shared(&docs[0]).min(shared(&docs[1]));
        Ok(docs.map(|doc| {
            let prefix_mismatch = shared(&doc) < prompt_ids.len();
            let mask = match doc.mask {
                Mask::From(first) => Mask::From(first.max(start)),
                Mask::Each(mut each) => {
                    each[..start].fill(false);
                    Mask::Each(each)
                }
            };
            Doc { mask, prefix_mismatch, ..doc }
        }))
    }

    /// The two documents of a pair, each with one score at its last token.
    fn sequences(&self, format: Format, sides: PreferenceSides) -> Result<[Doc; 2], RowFault> {
        let last = |doc: Doc| Doc { mask: Mask::From(doc.tokens.len().saturating_sub(1)), ..doc };
        Ok(self.whole(format, sides)?.map(last))
    }

    /// The two documents of a pair, prompt included.
    fn whole(&self, format: Format, sides: PreferenceSides) -> Result<[Doc; 2], RowFault> {
        let plain = |tokens: Vec<u32>| Doc { tokens, mask: Mask::From(0), prefix_mismatch: false };
        match sides {
            PreferenceSides::Text { prompt, chosen, rejected } => {
                // As in TRL, the EOS token is appended if the completion itself does not end with it.
                let text = |side: String| self.tokens(&(prompt.clone() + &self.with_eos(side)));
                Ok([plain(text(chosen)?), plain(text(rejected)?)])
            }
            PreferenceSides::Chat { prompt, chosen, rejected } => {
                let template = self.template(format)?;
                let conversation = |side: Vec<Value>| {
                    let mut chat = prompt.clone();
                    chat.messages.extend(side);
                    template.conversation(self.tokenizer, &chat).map(rendered)
                };
                Ok([conversation(chosen)?, conversation(rejected)?])
            }
            PreferenceSides::Tokens { chosen, rejected } => {
                Ok([plain(self.in_vocabulary(chosen)?), plain(self.in_vocabulary(rejected)?)])
            }
        }
    }

    fn template(&self, format: Format) -> Result<&dyn EncodeChat, RowFault> {
        self.chat.ok_or(RowFault::NoTemplate { format })
    }

    fn in_vocabulary(&self, ids: Vec<u32>) -> Result<Vec<u32>, RowFault> {
        let vocab = self.tokenizer.vocab_size();
        match ids.iter().find(|id| **id as usize >= vocab) {
            Some(id) => Err(RowFault::IdOutside { id: *id, vocab }),
            None => Ok(ids),
        }
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

/// The number of tokens at the start that both have.
fn num_shared(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

fn rendered(encoded: EncodedChat) -> Doc {
    let EncodedChat { tokens, supervised, prefix_mismatch } = encoded;
    assert_eq!(tokens.len(), supervised.len(), "a mask covers its tokens");
    Doc { tokens, mask: Mask::Each(supervised), prefix_mismatch }
}

/// The JSON text of a row with all its columns.
fn json_text(body: &Body) -> Result<String, RowFault> {
    match body {
        Body::Json(bytes) => match str::from_utf8(bytes) {
            Ok(text) => Ok(text.trim().into()),
            Err(e) => Err(RowFault::NotUtf8 { byte: e.valid_up_to() }),
        },
        Body::All(columns) | Body::Known(Named { columns, .. }) => {
            Ok(serde_json::to_string(columns).expect("JSON values can be written as text"))
        }
    }
}
