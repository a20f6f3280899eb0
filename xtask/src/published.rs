//! The packages that are published, as cargo reads their manifests.

use std::path::PathBuf;

use serde_json::Value;

/// A package of the workspace that is published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Package {
    /// What it is called.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The directory of its manifest.
    pub folder: PathBuf,
    /// The oldest Rust that its manifest states, such as `1.88`.
    pub rust: String,
    /// Whether others can depend on it.
    pub is_library: bool,
    /// Dependencies of its tests on packages of the workspace whose version it does not name:
    /// cargo leaves them out of what is published.
    pub left_out: Vec<String>,
}

/// The published packages of the workspace.
///
/// # Errors
///
/// Why cargo does not tell them, in one line.
pub fn packages() -> Result<Vec<Package>, String> {
    let mut metadata = crate::cargo(&["metadata", "--no-deps", "--format-version", "1"]);
    let output = metadata.output().map_err(|error| format!("cargo did not start: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    let metadata = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("`cargo metadata` printed no JSON: {error}; {}", said.trim()))?;
    Ok(published(&metadata))
}

/// The published packages in what `cargo metadata` prints: those whose `publish` names no registry
/// at all are not published.
fn published(metadata: &Value) -> Vec<Package> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let packages = list(&metadata["packages"]).into_iter();
    let packages = packages.filter(|package| package["publish"] != Value::Array(Vec::new()));
    let packages = packages.map(|package| {
        let targets = list(&package["targets"]);
        let is_left_out = |dependency: &&Value| {
            dependency["kind"] == "dev"
                && dependency["req"] == "*"
                && dependency["path"] != Value::Null
        };
        let dependencies = list(&package["dependencies"]);
        Package {
            name: text(&package["name"]),
            version: text(&package["version"]),
            folder: PathBuf::from(text(&package["manifest_path"])).with_file_name(""),
            rust: text(&package["rust_version"]),
            is_library: targets.iter().any(|target| target["kind"][0] == "lib"),
            left_out: dependencies.iter().filter(is_left_out).map(|it| text(&it["name"])).collect(),
        }
    });
    packages.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_package_is_published_unless_it_names_no_registry() {
        let package = |name: &str, publish: Value, kind: &str| {
            json!({
                "name": name, "version": "1.2.3", "publish": publish, "rust_version": "1.88",
                "manifest_path": format!("/a/{name}/Cargo.toml"), "targets": [{ "kind": [kind] }],
                "dependencies": [
                    { "name": "x", "kind": "dev", "req": "*", "path": "/a/x" },
                    { "name": "y", "kind": "dev", "req": "^1", "path": "/a/y" },
                    { "name": "z", "kind": null, "req": "*", "path": "/a/z" },
                    { "name": "w", "kind": "dev", "req": "*" },
                ],
            })
        };
        let packages = [
            package("open", Value::Null, "lib"),
            package("kept", json!([]), "lib"),
            package("program", json!(["crates-io"]), "bin"),
        ];
        let found = published(&json!({ "packages": packages }));
        let open = Package {
            name: "open".to_owned(),
            version: "1.2.3".to_owned(),
            folder: PathBuf::from("/a/open/"),
            rust: "1.88".to_owned(),
            is_library: true,
            left_out: vec!["x".to_owned()],
        };
        assert_eq!(found.len(), 2);
        assert_eq!(found[0], open);
        assert_eq!((found[1].name.as_str(), found[1].is_library), ("program", false));
        assert_eq!(published(&Value::Null), []);
    }
}
