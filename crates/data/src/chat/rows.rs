//! Conversations of a data set.

use serde_json::Value;

use super::{Chat, ChatTemplate, Encoded, Masks, encode, encode_pair};
use crate::{EncodeChat, RowFault, Tokenizer};

/// A template, and what of a conversation is learned.
#[derive(Debug)]
pub struct ChatRows {
    pub template: ChatTemplate,
    /// Only what the assistant says.
    pub assistant_only: bool,
}

impl EncodeChat for ChatRows {
    fn fingerprint(&self) -> String {
        format!("{} {}", self.template.fingerprint(), self.assistant_only)
    }

    fn conversation(&self, tokenizer: &Tokenizer, chat: &Chat) -> Result<Encoded, RowFault> {
        let masks = Masks { completion_only: false, assistant_only: self.assistant_only };
        Ok(encode(&self.template, tokenizer, chat, masks)?)
    }

    fn pair(
        &self,
        tokenizer: &Tokenizer,
        prompt: &Chat,
        completion: &[Value],
        completion_only: bool,
    ) -> Result<Encoded, RowFault> {
        let masks = Masks { completion_only, assistant_only: self.assistant_only };
        Ok(encode_pair(&self.template, tokenizer, prompt, completion, masks)?)
    }
}
