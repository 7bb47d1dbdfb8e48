//! Errors of chat templates, and of conversations rendered with them.

/// A template that cannot be parsed, or that fails on a conversation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("chat template {origin}{}: {why}", LineNumber(*line))]
pub struct TemplateFault {
    /// The template's file, or its name.
    pub origin: String,
    /// From 1.
    pub line: Option<usize>,
    pub why: String,
    /// Whether the template itself refused the conversation, through `raise_exception`.
    pub raised: bool,
}

/// Why a conversation could not be turned into tokens.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChatFault {
    #[error(transparent)]
    Template(#[from] TemplateFault),
    #[error("the conversation has no messages")]
    NoMessages,
    #[error("message {number} is {found}, expected an object with `role` and `content`")]
    NotAMessage {
        /// From 1.
        number: usize,
        found: &'static str,
    },
    #[error("`tools` is {found}, expected a list")]
    BadTools { found: String },
    #[error("`chat_template_kwargs` must not set `{name}`")]
    Reserved { name: String },
    /// `assistant_only_loss` is on, but the row has nothing to train on.
    #[error("assistant_only_loss is on, but the conversation has no assistant tokens")]
    NoAssistantTokens,
    #[error(
        "assistant_only_loss is on, but chat template {origin} has no {{% generation %}} block, and message {number} \
         cannot be located in its output: {why}"
    )]
    Untraceable {
        origin: String,
        /// From 1.
        number: usize,
        why: &'static str,
    },
    #[error("the tokenizer failed to encode the conversation: {why}")]
    NotEncodable { why: String },
}

impl TemplateFault {
    pub(crate) fn hint(&self) -> String {
        if self.raised {
            "the template rejects this conversation: change the conversation, or set chat_template_path to another \
             template."
                .into()
        } else {
            "fix the template, or set chat_template_path to another one.".into()
        }
    }
}

impl ChatFault {
    pub(crate) fn hint(&self) -> Option<String> {
        let text = match self {
            ChatFault::Template(fault) => return Some(fault.hint()),
            ChatFault::NoMessages | ChatFault::NotAMessage { .. } => {
                "write messages as {\"role\": \"user\", \"content\": \"…\"}."
            }
            ChatFault::BadTools { .. } => "write tools as a list of JSON schemas.",
            ChatFault::Reserved { .. } => "remove it: messages and tools are columns of their own.",
            ChatFault::NoAssistantTokens => {
                "add an assistant message to every conversation, or turn assistant_only_loss off."
            }
            ChatFault::Untraceable { .. } => {
                "copy the template, put {% generation %} and {% endgeneration %} around the assistant's content, and \
                 set chat_template_path to the copy."
            }
            ChatFault::NotEncodable { .. } => return None,
        };
        Some(text.into())
    }
}

struct LineNumber(Option<usize>);

impl std::fmt::Display for LineNumber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(line) => write!(f, " line {line}"),
            None => Ok(()),
        }
    }
}
