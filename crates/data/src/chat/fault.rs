//! What can be wrong with a template, and with a conversation under one.

/// A template that cannot be read, or fails on a conversation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("chat template {origin}{}: {why}", Line(*line))]
pub struct TemplateFault {
    /// The file, or what the template is called.
    pub origin: String,
    /// From 1.
    pub line: Option<usize>,
    pub why: String,
    /// Whether the template itself refused, through `raise_exception`.
    pub raised: bool,
}

/// Why a conversation has no tokens.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChatFault {
    #[error(transparent)]
    Template(#[from] TemplateFault),
    #[error("there are no messages")]
    NoMessages,
    #[error("message {number} is {found}; a message is an object with `role` and `content`")]
    NotAMessage {
        /// From 1.
        number: usize,
        found: &'static str,
    },
    #[error("`tools` is {found}, expected a list")]
    BadTools { found: String },
    #[error("`chat_template_kwargs` may not set `{name}`")]
    Reserved { name: String },
    /// Asked for, but the row has none.
    #[error("assistant_only_loss is on, but no assistant token is in the conversation")]
    NoAssistantTokens,
    #[error(
        "assistant_only_loss is on, but chat template {origin} has no {{% generation %}} block, and where \
         message {number} begins and ends in its output cannot be told: {why}"
    )]
    Untraceable {
        origin: String,
        /// From 1.
        number: usize,
        why: &'static str,
    },
    #[error("the tokenizer cannot encode it: {why}")]
    NotEncodable { why: String },
}

impl TemplateFault {
    pub(crate) fn hint(&self) -> String {
        if self.raised {
            "the template refuses this conversation; change the conversation, or give another template with \
             chat_template_path."
                .into()
        } else {
            "mend the template, or give another with chat_template_path.".into()
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
            ChatFault::Reserved { .. } => "give it as a column of its own.",
            ChatFault::NoAssistantTokens => {
                "give every conversation an assistant message, or turn assistant_only_loss off."
            }
            ChatFault::Untraceable { .. } => {
                "write {% generation %} and {% endgeneration %} around what the assistant says in a copy of \
                 the template, and give it with chat_template_path."
            }
            ChatFault::NotEncodable { .. } => return None,
        };
        Some(text.into())
    }
}

struct Line(Option<usize>);

impl std::fmt::Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(line) => write!(f, " line {line}"),
            None => Ok(()),
        }
    }
}
