// Command kubectl_yaml reads files as kubectl does: one line of JSON for each, with the documents
// that kubectl finds in it, or with its error. Each line of the input is a file, as a JSON string.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"os"
	"strings"

	"k8s.io/apimachinery/pkg/util/yaml"
)

type answer struct {
	Documents []any  `json:"documents"`
	Error     string `json:"error"`
}

func read(file string) (found answer) {
	found.Documents = []any{}
	decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(file), 4096)
	for {
		var document json.RawMessage
		if err := decoder.Decode(&document); err != nil {
			if !errors.Is(err, io.EOF) {
				found.Error = err.Error()
			}
			return found
		}
		if text := strings.TrimSpace(string(document)); text != "" && text != "null" {
			found.Documents = append(found.Documents, document)
		}
	}
}

func main() {
	input, output := bufio.NewScanner(os.Stdin), json.NewEncoder(os.Stdout)
	input.Buffer(nil, 1<<26)
	output.SetEscapeHTML(false)
	for input.Scan() {
		var file string
		if err := json.Unmarshal(input.Bytes(), &file); err != nil {
			panic(err)
		}
		if err := output.Encode(read(file)); err != nil {
			panic(err)
		}
	}
}
