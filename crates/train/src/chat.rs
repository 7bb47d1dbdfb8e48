//! Loads the chat template of a run.

use lockstep_config::{ChatTemplateChoice, RunConfig};
use lockstep_data::{ChatEncoder, ChatTemplate, DataError, DateTime, TemplateSource, Tokenizer};

use crate::error::TrainError;

/// Loads the chat template and returns the encoder of conversations. `None`: there is no template, which is an error
/// only if the data has conversations. A template from the configuration is also written to the model folder.
pub fn chat_encoder(
    config: &RunConfig,
    tokenizer: &mut Tokenizer,
) -> Result<Option<ChatEncoder>, TrainError> {
    let source = match &config.data.chat_template {
        ChatTemplateChoice::Auto => TemplateSource::Tokenizer,
        ChatTemplateChoice::Builtin => TemplateSource::Builtin,
        ChatTemplateChoice::Inline(text) => TemplateSource::Inline(text.clone()),
        ChatTemplateChoice::Path(path) => TemplateSource::Path(path.clone()),
    };
    // Use a fixed date, so that the training data does not depend on the day.
    let template = match ChatTemplate::load(&source, tokenizer, DateTime::default()) {
        Ok(template) => template,
        Err(DataError::NoChatTemplate { .. }) if source == TemplateSource::Tokenizer => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    if let Some(text) = template.file() {
        tokenizer.set_chat_template(text);
    }
    Ok(Some(ChatEncoder { template, assistant_only: config.data.assistant_only_loss }))
}
