// kubelab is one binary that holds etcd, every component of a single-node
// Kubernetes cluster, and kubectl of the same version. Run it as
// `kubelab COMPONENT [flags]`; `kubelab definitions` checks objects without a server.
package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var components = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllers.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	"kube-proxy":              proxy.NewProxyCommand,
	"definitions":             newDefinitionsCommand,
	"kubectl":                 func() *cobra.Command { return kubectl.NewDefaultKubectlCommand() },
}

func main() {
	if len(os.Args) > 1 {
		// The components read their flags from os.Args.
		name := os.Args[1]
		os.Args = os.Args[1:]
		if name == "etcd" {
			etcdmain.Main(os.Args)
			return
		}
		if command, ok := components[name]; ok {
			os.Exit(cli.Run(command()))
		}
	}
	names := slices.Sorted(maps.Keys(components))
	fmt.Fprintf(os.Stderr, "usage: kubelab etcd|%s [flags]\n", strings.Join(names, "|"))
	os.Exit(2)
}
