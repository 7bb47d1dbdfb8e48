//! Channels: the outputs of a head for every token.

/// One number per token. For each, an objective gives a coefficient: the derivative of the loss with respect to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Channel {
    /// The log-probability of the token's target.
    LogProb,
    /// The entropy of the predicted distribution.
    Entropy,
    /// The mean log-probability over the vocabulary.
    MeanLogProb,
    /// The scalar head's output: a value or a reward.
    Value,
}

impl Channel {
    pub const COUNT: usize = 4;
    pub const ALL: [Channel; Channel::COUNT] =
        [Channel::LogProb, Channel::Entropy, Channel::MeanLogProb, Channel::Value];
}

/// Which channels a model has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Channels {
    has: [bool; Channel::COUNT],
}

impl Channels {
    /// Log-probabilities alone.
    pub const LOG_PROB: Channels = Channels::of(&[Channel::LogProb]);
    /// The output of a scalar head.
    pub const VALUE: Channels = Channels::of(&[Channel::Value]);

    pub const fn of(channels: &[Channel]) -> Channels {
        let mut has = [false; Channel::COUNT];
        let mut i = 0;
        while i < channels.len() {
            has[channels[i] as usize] = true;
            i += 1;
        }
        Channels { has }
    }

    pub fn contains(&self, channel: Channel) -> bool {
        self.has[channel as usize]
    }

    /// The channels in the order they have in buffers.
    pub fn iter(&self) -> impl Iterator<Item = Channel> + use<> {
        let has = self.has;
        Channel::ALL.into_iter().filter(move |channel| has[*channel as usize])
    }

    pub fn count(&self) -> usize {
        self.iter().count()
    }

    /// The index of a channel in that order.
    pub fn index(&self, channel: Channel) -> Option<usize> {
        self.iter().position(|one| one == channel)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_have_a_fixed_order() {
        let some = Channels::of(&[Channel::MeanLogProb, Channel::LogProb]);
        assert_eq!(some.iter().collect::<Vec<_>>(), [Channel::LogProb, Channel::MeanLogProb]);
        assert_eq!((some.index(Channel::MeanLogProb), some.index(Channel::Value)), (Some(1), None));
        assert_eq!((some.count(), Channels::VALUE.count()), (2, 1));
    }
}
