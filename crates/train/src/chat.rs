//! The chat template of a run's conversations.

use lockstep_config::{ChatTemplate as Given, RunConfig};
use lockstep_data::{ChatRows, ChatTemplate, DataError, Moment, TemplateSource, Tokenizer};

use crate::error::TrainError;

/// What turns the run's conversations into tokens. `None`: nobody gave a template, which is an error only
/// if there is a conversation. A template of the run's own goes into the model folder with the tokenizer.
pub fn chat_rows(config: &RunConfig, tokenizer: &mut Tokenizer) -> Result<Option<ChatRows>, TrainError> {
    let source = match &config.data.chat_template {
        Given::Auto => TemplateSource::Tokenizer,
        Given::Builtin => TemplateSource::Builtin,
        Given::Inline(text) => TemplateSource::Inline(text.clone()),
        Given::Path(path) => TemplateSource::Path(path.clone()),
    };
    // A fixed day: what is trained on does not depend on when.
    let template = match ChatTemplate::load(&source, tokenizer, Moment::default()) {
        Ok(template) => template,
        Err(DataError::NoChatTemplate { .. }) if source == TemplateSource::Tokenizer => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    if let Some(text) = template.file() {
        tokenizer.set_chat_template(text);
    }
    Ok(Some(ChatRows { template, assistant_only: config.data.assistant_only_loss }))
}
