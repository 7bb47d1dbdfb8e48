//! Encodes the conversations of a dataset.

use serde_json::Value;

use super::encode::encode_prompt;
use super::{Chat, ChatTemplate, EncodedChat, LossMasks, encode_chat, encode_chat_pair};
use crate::{EncodeChat, RowFault, Tokenizer};

/// A chat template, and which part of a conversation counts in the loss.
#[derive(Debug)]
pub struct ChatEncoder {
    pub template: ChatTemplate,
    /// Only the assistant's tokens count.
    pub assistant_only: bool,
}

impl EncodeChat for ChatEncoder {
    fn fingerprint(&self) -> String {
        format!("{} {}", self.template.fingerprint(), self.assistant_only)
    }

    fn conversation(&self, tokenizer: &Tokenizer, chat: &Chat) -> Result<EncodedChat, RowFault> {
        let masks = LossMasks { completion_only: false, assistant_only: self.assistant_only };
        Ok(encode_chat(&self.template, tokenizer, chat, masks)?)
    }

    fn prompt(&self, tokenizer: &Tokenizer, chat: &Chat) -> Result<Vec<u32>, RowFault> {
        Ok(encode_prompt(&self.template, tokenizer, chat)?)
    }

    fn pair(
        &self,
        tokenizer: &Tokenizer,
        prompt: &Chat,
        completion: &[Value],
        completion_only: bool,
    ) -> Result<EncodedChat, RowFault> {
        let masks = LossMasks { completion_only, assistant_only: self.assistant_only };
        Ok(encode_chat_pair(&self.template, tokenizer, prompt, completion, masks)?)
    }
}
