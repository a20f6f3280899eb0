//! The archive that a guest begins with (Documentation/driver-api/early-userspace/
//! buffer-format.rst, "newc").

/// An archive that grows.
#[derive(Debug, Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const FOLDER: u32 = 0o040_755;
const FILE: u32 = 0o100_755;
const LINK: u32 = 0o120_777;

impl Archive {
    /// Adds a folder. Those above it have to be there already.
    pub(super) fn folder(&mut self, path: &str) {
        self.entry(path, FOLDER, &[]);
    }

    /// Adds a file that may be run.
    pub(super) fn file(&mut self, path: &str, contents: &[u8]) {
        self.entry(path, FILE, contents);
    }

    /// Adds a symbolic link.
    pub(super) fn link(&mut self, path: &str, to: &str) {
        self.entry(path, LINK, to.as_bytes());
    }

    /// The whole archive.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, contents: &[u8]) {
        self.entries += 1;
        let (inode, links, owner, time, device) = (self.entries, 1, 0, 0, 0);
        let (size, name_size, checksum) = (contents.len(), path.len() + 1, 0);
        let header = format!(
            "070701{inode:08x}{mode:08x}{owner:08x}{owner:08x}{links:08x}{time:08x}{size:08x}\
             {device:08x}{device:08x}{device:08x}{device:08x}{name_size:08x}{checksum:08x}"
        );
        self.bytes.extend(header.as_bytes());
        self.bytes.extend(path.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend(contents);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_a_header_a_name_and_contents_each_padded_to_four_bytes() {
        let mut archive = Archive::default();
        archive.folder("bin");
        archive.file("bin/x", b"hello");
        archive.link("y", "bin/x");
        let bytes = archive.finish();
        let text = String::from_utf8(bytes.clone()).unwrap();
        // 110 bytes of header, and the name with its end.
        assert!(text.starts_with("070701"));
        assert_eq!(&text[110..114], "bin\0");
        let second = (110usize + 4).next_multiple_of(4);
        assert!(text[second..].starts_with("07070100000002000081ed"));
        assert_eq!(&text[second + 54..second + 62], "00000005", "the size");
        assert_eq!(&text[second + 94..second + 102], "00000006", "the name's");
        let data = second + (110usize + 6).next_multiple_of(4);
        assert_eq!(&text[data..data + 8], "hello\0\0\0");
        assert!(text[data + 8..].starts_with("070701000000030000a1ff"), "{}", &text[data + 8..]);
        assert!(text[data + 8..].contains("y\0") && text[data + 8..].contains("bin/x\0"));
        assert!(text[data + 8..].contains("TRAILER!!!\0"));
        assert_eq!(bytes.len() % 4, 0);
    }
}
