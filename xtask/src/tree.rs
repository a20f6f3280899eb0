//! The source tree, read once for all rules.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::LazyLock;

use crate::lexer::{self, Lexed};

/// Directories that hold nothing written by hand.
const SKIPPED: [&str; 3] = ["target", ".git", "proptest-regressions"];

/// A text file.
#[derive(Debug)]
pub struct File {
    /// Its path from the workspace's directory on, with `/` between the parts.
    pub path: String,
    /// All of it.
    pub text: String,
    /// What it says as Rust, where it is.
    pub rust: Option<Lexed>,
}

impl File {
    fn new(path: String, text: String) -> Self {
        let rust = path.ends_with(".rs").then(|| lexer::lex(&text));
        Self { path, text, rust }
    }
}

/// All text files of a workspace, by path.
#[derive(Debug)]
pub struct Tree {
    files: Vec<File>,
}

impl Tree {
    /// The files below `root` that are text, but those of build directories and of git.
    ///
    /// # Errors
    ///
    /// Whatever reading a directory or a file says.
    pub fn read(root: &Path) -> io::Result<Self> {
        let mut files = Vec::new();
        read_directory(root, "", &mut files)?;
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(Self { files })
    }

    /// This workspace's, which is read once however many ask for it.
    ///
    /// # Errors
    ///
    /// As of [`read`](Self::read), in a line.
    pub fn of_workspace() -> Result<&'static Self, &'static str> {
        static TREE: LazyLock<Result<Tree, String>> = LazyLock::new(|| {
            Tree::read(&crate::root()).map_err(|error| format!("the tree cannot be read: {error}"))
        });
        TREE.as_ref().map_err(String::as_str)
    }

    /// A tree that was made up.
    pub fn of(files: &[(&str, &str)]) -> Self {
        let file = |&(path, text): &(&str, &str)| File::new(path.to_owned(), text.to_owned());
        Self { files: files.iter().map(file).collect() }
    }

    /// All files.
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// The file at `path`.
    pub fn file(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }

    /// The Rust files whose paths begin with `prefix`, and what they say.
    pub fn rust<'t>(&'t self, prefix: &str) -> impl Iterator<Item = (&'t File, &'t Lexed)> {
        let files = self.files.iter().filter(move |file| file.path.starts_with(prefix));
        files.filter_map(|file| Some((file, file.rust.as_ref()?)))
    }
}

fn read_directory(directory: &Path, prefix: &str, files: &mut Vec<File>) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let path = if prefix.is_empty() { name.to_owned() } else { format!("{prefix}/{name}") };
        let kind = entry.file_type()?;
        if kind.is_dir() && !SKIPPED.contains(&name) {
            read_directory(&entry.path(), &path, files)?;
        } else if kind.is_file() {
            match fs::read(entry.path()) {
                // What is not text has no rules to keep.
                Ok(bytes) => {
                    files.extend(String::from_utf8(bytes).map(|text| File::new(path, text)))
                }
                // An editor's or a build's temporary file may be gone again.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

/// A path without `.` and `..`.
pub(crate) fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir if normal.file_name().is_some() => drop(normal.pop()),
            part => normal.push(part),
        }
    }
    normal
}
