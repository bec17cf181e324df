//! A section of a fabric file, written from flags.

/// One section under way.
#[derive(Debug)]
pub(crate) struct Section(String);

/// A basic string of TOML. It is the same as a JSON string, except for DEL, which serde_json leaves
/// as it is.
pub(crate) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

impl Section {
    pub(crate) fn new(kind: &str, name: &str) -> Section {
        Section(format!("[{kind}.{}]\n", quoted(name)))
    }

    pub(crate) fn text(mut self, key: &str, value: Option<&str>) -> Self {
        if let Some(value) = value {
            self.0.push_str(&format!("{key} = {}\n", quoted(value)));
        }
        self
    }

    pub(crate) fn number(mut self, key: &str, value: Option<u32>) -> Self {
        if let Some(value) = value {
            self.0.push_str(&format!("{key} = {value}\n"));
        }
        self
    }

    pub(crate) fn flag(mut self, key: &str, value: bool) -> Self {
        if value {
            self.0.push_str(&format!("{key} = true\n"));
        }
        self
    }

    pub(crate) fn list(mut self, key: &str, values: &[String]) -> Self {
        if !values.is_empty() {
            let values: Vec<_> = values.iter().map(|v| quoted(v)).collect();
            self.0.push_str(&format!("{key} = [{}]\n", values.join(", ")));
        }
        self
    }

    pub(crate) fn finish(self) -> String {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tombolo_host::file;

    #[test]
    fn values_are_data_and_never_sections() {
        let base = file::parse("[network.lan]\n", std::path::Path::new("x.toml")).unwrap();
        let text = Section::new("port", "p")
            .text("kind", Some("vhost-user"))
            .text("socket", Some("a \"b\"\n\u{7f}"))
            .number("queues", Some(2))
            .text("mac", None)
            .flag("connect", false)
            .finish();
        let fabric = file::add(&text, std::path::Path::new("request"), &base).unwrap();
        let file::PortKind::VhostUser { socket, queues, connect: false } = &fabric.ports[0].kind else {
            panic!("{text}")
        };
        assert_eq!(*queues, 2);
        assert!(socket.as_ref().unwrap().ends_with("a \"b\"\n\u{7f}"));
        let injected = Section::new("port", "p]\n[tap.q").finish();
        assert!(file::add(&injected, std::path::Path::new("request"), &base).is_err());
    }
}
