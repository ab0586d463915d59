// envoy asks an endpoint picker as Envoy does: over its external processing protocol.
//
// Each line of input is the body of a request to /v1/completions, and becomes one line of output:
// the endpoint that the picker chose, or the HTTP status with which it refused the request.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

const (
	endpointHeader = "x-gateway-destination-endpoint"
	timeout        = 10 * time.Second
)

func main() {
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(picker string) error {
	connection, err := grpc.NewClient(picker, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	client := extproc.NewExternalProcessorClient(connection)
	input := bufio.NewScanner(os.Stdin)
	for input.Scan() {
		answer, err := pick(client, input.Bytes())
		if err != nil {
			answer = fmt.Sprintf("error: %v", err)
		}
		fmt.Println(answer)
	}
	return input.Err()
}

func pick(client extproc.ExternalProcessorClient, body []byte) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	stream, err := client.Process(ctx)
	if err != nil {
		return "", err
	}
	headers := &extproc.ProcessingRequest_RequestHeaders{RequestHeaders: &extproc.HttpHeaders{
		Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{
			{Key: ":method", RawValue: []byte("POST")},
			{Key: ":path", RawValue: []byte("/v1/completions")},
			{Key: "content-type", RawValue: []byte("application/json")},
		}},
	}}
	content := &extproc.ProcessingRequest_RequestBody{RequestBody: &extproc.HttpBody{
		Body: body, EndOfStream: true,
	}}
	for _, one := range []*extproc.ProcessingRequest{{Request: headers}, {Request: content}} {
		if err := stream.Send(one); err != nil {
			return "", err
		}
	}
	for {
		answer, err := stream.Recv()
		if err != nil {
			return "", err
		}
		switch kind := answer.Response.(type) {
		case *extproc.ProcessingResponse_ImmediateResponse:
			return fmt.Sprintf("%d", kind.ImmediateResponse.GetStatus().GetCode()), nil
		case *extproc.ProcessingResponse_RequestHeaders:
			changed := kind.RequestHeaders.GetResponse().GetHeaderMutation().GetSetHeaders()
			for _, header := range changed {
				if header.GetHeader().GetKey() == endpointHeader {
					return string(header.GetHeader().GetRawValue()), nil
				}
			}
			return "", errors.New("the picker set no " + endpointHeader)
		}
	}
}
