//! Facts of a port's kind, for status: numbers stay numbers.

use std::fmt;

/// The value of one fact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detail {
    /// A count or an identifier. Units are in the fact's name.
    Number(u64),
    /// Whether it is so.
    Flag(bool),
    /// A word, a name, or a sentence for people.
    Text(String),
    /// One number for each of several things.
    Numbers(Vec<u64>),
    /// Several words or names.
    Texts(Vec<String>),
}

/// Names and values.
pub type Details = Vec<(&'static str, Detail)>;

impl Detail {
    /// The text of one that is a text; else the empty one.
    pub fn text(&self) -> &str {
        match self {
            Detail::Text(text) => text,
            _ => "",
        }
    }

    /// The number of one that is a number.
    pub fn number(&self) -> Option<u64> {
        match self {
            Detail::Number(number) => Some(*number),
            _ => None,
        }
    }
}

/// For people: lists have their items beside each other.
impl fmt::Display for Detail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn list<T: fmt::Display>(f: &mut fmt::Formatter<'_>, items: &[T]) -> fmt::Result {
            items.iter().enumerate().try_for_each(|(i, item)| write!(f, "{}{item}", if i == 0 { "" } else { " " }))
        }
        match self {
            Detail::Number(number) => write!(f, "{number}"),
            Detail::Flag(flag) => write!(f, "{flag}"),
            Detail::Text(text) => f.write_str(text),
            Detail::Numbers(numbers) => list(f, numbers),
            Detail::Texts(texts) => list(f, texts),
        }
    }
}

impl From<u64> for Detail {
    fn from(number: u64) -> Detail {
        Detail::Number(number)
    }
}

impl From<u32> for Detail {
    fn from(number: u32) -> Detail {
        Detail::Number(number.into())
    }
}

impl From<u16> for Detail {
    fn from(number: u16) -> Detail {
        Detail::Number(number.into())
    }
}

impl From<usize> for Detail {
    fn from(number: usize) -> Detail {
        Detail::Number(number as u64)
    }
}

impl From<bool> for Detail {
    fn from(flag: bool) -> Detail {
        Detail::Flag(flag)
    }
}

impl From<String> for Detail {
    fn from(text: String) -> Detail {
        Detail::Text(text)
    }
}

impl From<&str> for Detail {
    fn from(text: &str) -> Detail {
        Detail::Text(text.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_value_has_its_text() {
        let all: Details = vec![
            ("mtu", 1500u16.into()),
            ("learning", true.into()),
            ("state", "up".into()),
            ("ring_sizes", Detail::Numbers(vec![256, 128])),
            ("remotes", Detail::Texts(vec!["a".into(), "b".into()])),
            ("none", Detail::Texts(vec![])),
        ];
        let texts: Vec<_> = all.iter().map(|(_, value)| value.to_string()).collect();
        assert_eq!(texts, ["1500", "true", "up", "256 128", "a b", ""]);
        assert_eq!(
            (all[0].1.number(), all[2].1.number(), all[0].1.text(), all[2].1.text()),
            (Some(1500), None, "", "up")
        );
    }
}
